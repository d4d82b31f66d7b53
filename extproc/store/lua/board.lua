-- board: the replicas that have published a document, and until when each document lasts.
--
-- KEYS     the board's key; to publish, also that of the replica's document, in the same hash slot
-- ARGV     to publish: the replica (1 to 255 bytes), its document, ttl_ms, how many replicas are kept; always last:
--          now_ms (-1: the server's clock)
-- returns  the replicas whose documents have not expired, the one that published last at the end
--
-- The board's value is a record for each replica: when its document expires in milliseconds, packed, one byte with the length of its
-- name, the name. The value decides; the keys' own expiry only collects garbage. The rules are those of extproc/store/boards.py.

local HEAD = '>I8'
local GARBAGE_MS = 1000

local clock = redis.call('TIME')
local now = tonumber(ARGV[#ARGV])
if now == -1 then now = clock[1] * 1000 + math.floor(clock[2] / 1000) end

local names, expires, from = {}, {}, 1
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then -- not ours
  redis.call('DEL', KEYS[1])
  value = ''
end
value = value or ''
while from + 8 < #value do
  local lasts, length = struct.unpack(HEAD, value, from), string.byte(value, from + 8)
  local name = string.sub(value, from + 9, from + 8 + length)
  if now < lasts and (#KEYS == 1 or name ~= ARGV[1]) and #name == length then
    names[#names + 1], expires[#expires + 1] = name, lasts
  end
  from = from + 9 + length
end
if #KEYS == 1 then return names end

local ttl, most = tonumber(ARGV[3]), tonumber(ARGV[4])
while #names >= most do -- the one that would expire first makes room
  local first = 1
  for place = 2, #names do
    if expires[place] < expires[first] then first = place end
  end
  table.remove(names, first)
  table.remove(expires, first)
end
names[#names + 1], expires[#expires + 1] = ARGV[1], now + ttl

local records, longest = {}, ttl
for place, name in ipairs(names) do
  records[place] = struct.pack(HEAD, expires[place]) .. string.char(#name) .. name
  longest = math.max(longest, expires[place] - now)
end
redis.call('SET', KEYS[1], table.concat(records), 'PX', longest + GARBAGE_MS)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ttl + GARBAGE_MS)
return names
