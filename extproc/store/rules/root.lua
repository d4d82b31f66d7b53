-- root: the root session of each agent whose requests name only its parent.
--
-- KEYS     for each agent two keys, all in one hash slot: its own and its parent's
-- ARGV     for each agent, or once if they are the same for all, two values: the parent's session (8 bytes), ttl_ms
-- returns  for each agent its root session
--
-- A key's value is a version and the root session. The rules are those of root.py.

local VERSION = '\1'
local SIZE = 9

local function get(key)
  local value = key and redis.pcall('GET', key) or false
  if type(value) == 'table' then redis.call('DEL', key) end -- not written by Loopguard: one such key must not fail a whole batch
  if type(value) ~= 'string' or #value ~= SIZE or string.sub(value, 1, 1) ~= VERSION then return nil end
  return string.sub(value, 2)
end

local answers, at = {}, 0
for place = 1, #KEYS, 2 do
  local root = get(KEYS[place]) or get(KEYS[place + 1]) or ARGV[at + 1]
  redis.call('SET', KEYS[place], VERSION .. root, 'PX', ARGV[at + 2])
  answers[#answers + 1] = root
  if #ARGV > 2 then at = at + 2 end
end
return answers
