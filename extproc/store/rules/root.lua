-- root: the root session of an agent whose requests name only its parent; a part of roots.lua and session.lua.
--
-- A key's value is a version and the root session. The rules are those of root.py.

local ROOT_VERSION = '\1'
local ROOT_SIZE = 9

local function get_root(key)
  local value = key and redis.pcall('GET', key) or false -- an error for a key of another program
  if type(value) ~= 'string' or #value ~= ROOT_SIZE or string.sub(value, 1, 1) ~= ROOT_VERSION then return nil end
  return string.sub(value, 2)
end

local function find_root(key, parent_key, parent, ttl_ms)
  local root = get_root(key) or get_root(parent_key) or parent
  redis.call('SET', key, ROOT_VERSION .. root, 'PX', ttl_ms)
  return root
end
