-- take_back: removes requests whose upstream failed from the counts that include them.
--
-- KEYS     one or more keys, all in one hash slot
-- ARGV     for each key, or once if they are the same for all: the kind of its value, tally, log or chain
-- returns  for each key an empty string
--
-- The formats are those of tally.lua, sliding_log.lua and chain.lua. A key keeps its expiry.

local TALLY_VERSION, TALLY, SIZE = 1, '>BI4I8I8I8', 29
local CHAIN_VERSION, RETRIES = 2, 44

local function read(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''
end

local function write(key, value) redis.call('SET', key, value, 'KEEPTTL') end

local take_back = {}

function take_back.tally(key)
  local value = read(key)
  if #value ~= SIZE or string.byte(value) ~= TALLY_VERSION then return end
  local version, count, first, last, cooling = struct.unpack(TALLY, value)
  write(key, struct.pack(TALLY, version, math.max(0, count - 1), first, last, cooling))
end

function take_back.log(key)
  local length = redis.pcall('LLEN', key)
  if type(length) == 'number' and length > 1 then redis.call('RPOP', key) end
end

function take_back.chain(key)
  local value = read(key)
  local retries = string.byte(value, RETRIES) or 0
  if string.byte(value) ~= CHAIN_VERSION or retries == 0 then return end
  write(key, string.sub(value, 1, RETRIES - 1) .. string.char(retries - 1) .. string.sub(value, RETRIES + 1))
end

local answers = {}
for i, key in ipairs(KEYS) do
  local rule = take_back[#ARGV == 1 and ARGV[1] or ARGV[i]]
  if rule then rule(key) end
  answers[i] = ''
end
return answers
