-- ring: the newest entries of each key, one for each request.
--
-- KEYS     one or more keys, all in one hash slot
-- ARGV     for each key, or once if they are the same for all, five values: the entry, the digest of its request (8 bytes),
--          size (number of entries to keep), ttl_ms, now_ms (-1: the server's clock)
-- returns  for each key its records, oldest first, including the new one: digest, one byte for the entry's length, the entry
--
-- A key's value is a version and the time of its last push in milliseconds, packed, and its records. The value decides; the
-- key's own expiry only collects garbage. The rules are those of ring.py.

local VERSION = 1
local HEAD, HEAD_SIZE = '>BI8', 9
local GARBAGE_MS = 1000

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers = {}

for i, key in ipairs(KEYS) do
  local at = #ARGV == 5 and 0 or (i - 1) * 5
  local entry, request, size = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local ttl, now = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  if now == -1 then now = server_now end

  local starts, from = {}, HEAD_SIZE + 1 -- starts of the records in the value
  local value = redis.pcall('GET', key) -- an error for a key of another program
  local version, last = nil, nil
  if type(value) == 'string' and #value >= HEAD_SIZE then version, last = struct.unpack(HEAD, value) end
  if version == VERSION and math.abs(now - last) < ttl then
    while from <= #value do
      starts[#starts + 1] = from
      from = from + 9 + (string.byte(value, from + 8) or 0)
    end
    if from ~= #value + 1 then starts = {} end -- not written by Loopguard either
  end

  local kept, known = math.min(#starts, size), false
  for place = #starts - kept + 1, #starts do
    known = known or string.sub(value, starts[place], starts[place] + 7) == request
  end
  if not known then kept = math.min(kept, size - 1) end
  local answer = kept > 0 and string.sub(value, starts[#starts - kept + 1]) or ''
  if not known then answer = answer .. request .. string.char(#entry) .. entry end
  redis.call('SET', key, struct.pack(HEAD, VERSION, now) .. answer, 'PX', ttl + GARBAGE_MS)
  answers[i] = answer
end

return answers
