-- documents: named documents with an expiry.
--
-- KEYS     the ends (sorted set: name by end in ms), the documents (hash by name), the version (string); all in one hash slot
-- ARGV     the operation and its arguments; always last: now_ms (-1: the server's clock)
--            put:  name, document, ttl_ms, maximum number, whether the document that expires first makes room (1 or 0)
--            drop: name
--            list: the version that the caller knows
-- returns  put:  1, or 0 if there is no room
--          drop: 1, or 0 if there is no document of that name
--          list: nothing if nothing has changed, else the version and the names of unexpired documents
--
-- The ends decide; the keys' own expiry only collects garbage. The rules are those of documents.py.

local GARBAGE_MS = 1000
local PORTION = 1000 -- maximum number of names in one call of unpack

local ends, documents, version = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = tonumber(ARGV[#ARGV])
if now == -1 then now = clock[1] * 1000 + math.floor(clock[2] / 1000) end

local function is_odd(...)
  local reply = redis.pcall(...)
  return type(reply) == 'table' and reply.err
end
if is_odd('ZCARD', ends) or is_odd('HMGET', documents, '') or is_odd('GET', version) then -- not written by Loopguard
  redis.call('DEL', ends, documents, version)
end

if ARGV[1] == 'list' then
  local known = redis.call('GET', version) or ''
  if known == ARGV[2] then return {} end
  local names = redis.call('ZRANGEBYSCORE', ends, string.format('(%.0f', now), '+inf')
  table.insert(names, 1, known)
  return names
end

local function forget(names)
  if #names == 0 then return end
  redis.call('ZREM', ends, unpack(names))
  redis.call('HDEL', documents, unpack(names))
end
forget(redis.call('ZRANGEBYSCORE', ends, '-inf', string.format('%.0f', now), 'LIMIT', 0, PORTION))

local name, changed = ARGV[2], 1
if ARGV[1] == 'put' then
  if not redis.call('ZSCORE', ends, name) and redis.call('ZCARD', ends) >= tonumber(ARGV[5]) then
    if ARGV[6] == '0' then return 0 end
    forget(redis.call('ZRANGE', ends, 0, 0))
  end
  redis.call('ZADD', ends, string.format('%.0f', now + tonumber(ARGV[4])), name)
  redis.call('HSET', documents, name, ARGV[3])
else
  changed = redis.call('ZREM', ends, name)
  redis.call('HDEL', documents, name)
end

local last = redis.call('ZRANGE', ends, -1, -1, 'WITHSCORES')
local lasts = string.format('%.0f', (tonumber(last[2]) or now) - now + GARBAGE_MS)
redis.call('SET', version, table.concat({clock[1], clock[2], name}, '.'), 'PX', lasts)
redis.call('PEXPIRE', ends, lasts)
redis.call('PEXPIRE', documents, lasts)
return changed
