-- tree: the agents below a root session, and whether another one may begin; a part of session.lua.
--
-- A tree's value is its head, packed as TREE_HEAD, and an AGENT for each agent; that of the newest request is last. Formats, rules
-- and names are those of tree.py.

local TREE_VERSION = 1
local TREE_HEAD, TREE_HEAD_SIZE = '>BI8I8I4I4', 25
local AGENT, AGENT_SIZE = '>c8I2I8I8', 26
local TREE_ASKED, TREE_ASKED_SIZE, TREE_ANSWER = '>c8c8i4i4i4i4I8', 40, '>I4I4I2B'
local ROOT = string.rep('\0', 8)
local MAX_AGENTS, MINUTE_MS, MOST, MAX_DEPTH, UNKNOWN_DEPTH = 1024, 60000, 4294967295, 65535, 2

local function find_agent(nodes, agent)
  local at = string.find(nodes, agent, 1, true)
  while at and (at - 1) % AGENT_SIZE > 0 do at = string.find(nodes, agent, at + 1, true) end
  return at
end

local function find_depth(nodes, parent)
  if parent == ROOT then return 1 end
  local at = find_agent(nodes, parent)
  return at and math.min(struct.unpack('>I2', nodes, at + 8) + 1, MAX_DEPTH) or UNKNOWN_DEPTH
end

local function find_agent_limit(nodes, agents, depth, asked, now) -- returns its index in AGENT_LIMITS, used and allowed
  if asked.depth >= 0 and depth > asked.depth then return 0, depth, asked.depth end
  if asked.agents >= 0 and agents >= asked.agents then return 1, agents, asked.agents end
  if asked.concurrent < 0 and asked.spawns < 0 then return nil, 0, 0 end
  local active, spawns, at = 0, 0, #nodes - AGENT_SIZE + 1
  while at >= 1 do
    local _, _, first, last = struct.unpack(AGENT, nodes, at)
    if now - last >= math.max(asked.idle, MINUTE_MS) then break end
    if now - last < asked.idle then active = active + 1 end
    if now - first < MINUTE_MS then spawns = spawns + 1 end
    if asked.concurrent >= 0 and active >= asked.concurrent then return 2, active, asked.concurrent end
    at = at - AGENT_SIZE
  end
  if asked.concurrent >= 0 and active >= asked.concurrent then return 2, active, asked.concurrent end
  if asked.spawns >= 0 and spawns >= asked.spawns then return 3, spawns, asked.spawns end
  return nil, 0, 0
end

local function read_tree_question(packed)
  local asked = {}
  asked.agent, asked.parent, asked.depth, asked.agents, asked.concurrent, asked.spawns, asked.idle =
    struct.unpack(TREE_ASKED, packed)
  return asked
end

-- Returns the value to store ('' for none), the answer, and the index of the limit that refuses (nil for none), used and allowed.
local function admit(value, asked, began, now, passes)
  local _, stamp, agents, refused, nodes = nil, nil, 0, 0, ''
  if #value >= TREE_HEAD_SIZE and string.byte(value) == TREE_VERSION and (#value - TREE_HEAD_SIZE) % AGENT_SIZE == 0 then
    _, _, stamp, agents, refused = struct.unpack(TREE_HEAD, value)
    if stamp == began then nodes = string.sub(value, TREE_HEAD_SIZE + 1) else agents, refused = 0, 0 end
  end
  local limit, used, allowed, depth, begins = nil, 0, 0, 0, false
  if asked.agent ~= ROOT then
    local at = find_agent(nodes, asked.agent)
    if at then
      local _, known, first = struct.unpack(AGENT, nodes, at)
      depth = known
      nodes = string.sub(nodes, 1, at - 1) .. string.sub(nodes, at + AGENT_SIZE) .. struct.pack(AGENT, asked.agent, depth, first, now)
    elseif passes then
      depth = find_depth(nodes, asked.parent)
      limit, used, allowed = find_agent_limit(nodes, agents, depth, asked, now)
      if limit then
        refused = math.min(refused + 1, MOST)
      else
        begins, agents = true, math.min(agents + 1, MOST)
        nodes = string.sub(nodes, -(MAX_AGENTS - 1) * AGENT_SIZE) .. struct.pack(AGENT, asked.agent, depth, now, now)
      end
    end
  end
  local kept = ''
  if agents > 0 or refused > 0 then kept = struct.pack(TREE_HEAD, TREE_VERSION, now, began, agents, refused) .. nodes end
  return kept, struct.pack(TREE_ANSWER, agents, refused, depth, begins and 1 or 0), limit, used, allowed
end
