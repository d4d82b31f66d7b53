-- session: what sessions have used up, and whether one more request is let through; or what became of one that was.
--
-- KEYS     for each step three keys, all in one hash slot: the session's ledger, the tenant's roster, the ledger of sessions that
--          are too many; for each settlement the ledger's. One step may come with its first key alone: then there is room
-- ARGV     for each step or settlement, or once where they are the same for all, five values: now_ms (-1: the server's clock);
--          what is asked, packed as ASKED; the tools that have limits, packed as TOOL; the names of the tools in the history, each
--          a digest and a length before it; the tool calls in the history
-- returns  for each how the session stands, packed as STANDING, a number for each tool as TOOL, and the tools' names
--
-- The formats and the rules are those of extproc/ledger.py, and so are the names here. The value decides; the key's own expiry only
-- collects garbage.

local HEAD, HEAD_SIZE = '>I8I8I8I8I8I4I4I4I4I4I4BBBBI2', 70
local RESERVATION, RESERVATION_SIZE = '>c16c8I8I8I4I4B', 49
local TOOL, TOOL_SIZE = '>c4I4', 8
local ROSTER, ROSTER_SIZE = '>I8I8I4', 20
local ASKED = '>BBBc16c8I8I8I8i8i8i8i8i8i8i8I4'
local STANDING = '>BBBBc4i8i8I4I4I4I4I4I8I8I8I8B'

local RECORD, ID, NAME, IDENTITY, IDENTITIES = 14, 6, 10, 8, 16
local OPEN, OPEN_MS = 32, 600000
local TOOLS, MOST_TOOLS = 64, 255
local MAX, MAX_MONEY = 4294967295, 4503599627370496
local FAILED, REFUSED, STEP, WITHDRAWN = 1, 2, 3, 4
local RETRY, NARROWED = 1, 2
local GARBAGE_MS = 1000

local sub = string.sub

local function find(joined, start, width) -- where an item that starts so stands among items of one width
  local at = string.find(joined, start, 1, true)
  while at and (at - 1) % width > 0 do at = string.find(joined, start, at + 1, true) end
  return at
end

local function get(key)
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then redis.call('DEL', key) end -- not ours: one odd key must not fail a whole batch
  return type(value) == 'string' and value or ''
end

local function make(now)
  return {
    last = now, began = now, cost = 0, estimated = 0, reserved = 0, steps = 0, tool_calls = 0, narrowed_at = 0, blocks = 0,
    consecutive_blocks = 0, consecutive_errors = 0, killed = 0, identities = '', open = '', counts = '', names = '', records = '',
  }
end

local function unpack_ledger(value)
  if #value < HEAD_SIZE then return nil end
  local l, identities, open, tools, names, at = {}, nil, nil, nil, nil, nil
  l.last, l.began, l.cost, l.estimated, l.reserved, l.steps, l.tool_calls, l.narrowed_at, l.blocks, l.consecutive_blocks,
    l.consecutive_errors, l.killed, identities, open, tools, names, at = struct.unpack(HEAD, value)
  local records = #value + 1 - at - identities * IDENTITY - open * RESERVATION_SIZE - tools * TOOL_SIZE - names
  if records < 0 or records % RECORD > 0 then return nil end -- not ours either
  local function cut(length)
    at = at + length
    return sub(value, at - length, at - 1)
  end
  l.identities, l.open, l.counts = cut(identities * IDENTITY), cut(open * RESERVATION_SIZE), cut(tools * TOOL_SIZE)
  l.names, l.records = cut(names), cut(records)
  return l
end

local function pack_ledger(l)
  local head = struct.pack(HEAD, l.last, l.began, l.cost, l.estimated, l.reserved, l.steps, l.tool_calls, l.narrowed_at, l.blocks,
    l.consecutive_blocks, l.consecutive_errors, l.killed, #l.identities / IDENTITY, #l.open / RESERVATION_SIZE,
    #l.counts / TOOL_SIZE, #l.names)
  return table.concat({head, l.identities, l.open, l.counts, l.names, l.records})
end

local function recall(key, asked)
  local value = get(key)
  local l = unpack_ledger(value)
  if l and math.abs(asked.now - l.last) < asked.idle then return l end
  if value ~= '' then redis.call('DEL', key) end
  return nil
end

local function keep(key, l, asked)
  local lifetime = math.max(0, l.last + asked.idle - asked.now) + GARBAGE_MS
  redis.call('SET', key, pack_ledger(l), 'PX', lifetime)
end

local function enter(key, asked)
  local value = get(key)
  local now, _, began, count = asked.now, nil, asked.now, 0
  if #value == ROSTER_SIZE then _, began, count = struct.unpack(ROSTER, value) end
  if math.abs(now - began) >= asked.idle then began, count = now, 0 end
  local room = count < asked.max_sessions
  if room then count = count + 1 end
  redis.call('SET', key, struct.pack(ROSTER, now, began, count), 'PX', asked.idle + GARBAGE_MS)
  return room
end

local function pay(l, cost, estimated)
  l.cost = math.min(l.cost + cost, MAX_MONEY)
  l.estimated = math.min(l.estimated + estimated, MAX_MONEY)
end

local function close_old(l, now)
  while #l.open > 0 do
    local _, _, begun, reserve = struct.unpack(RESERVATION, l.open)
    if #l.open <= OPEN * RESERVATION_SIZE and now - begun < OPEN_MS then break end
    l.open = sub(l.open, RESERVATION_SIZE + 1)
    l.reserved = l.reserved - reserve
    pay(l, reserve, reserve)
  end
end

local function count_room(l, tool, limited)
  local missing = 0
  for at = 1, #limited, TOOL_SIZE do
    local digest = sub(limited, at, at + 3)
    if digest == tool then return MOST_TOOLS end
    if not find(l.counts, digest, TOOL_SIZE) then missing = missing + 1 end
  end
  return TOOLS - missing
end

local function find_name(names, tool) -- behind its length
  local at = 1
  while at < #names do
    local length = string.byte(names, at + 4)
    if sub(names, at, at + 3) == tool then return sub(names, at + 4, at + 4 + length) end
    at = at + 5 + length
  end
  return '\0'
end

local function count_calls(l, tool)
  local at = find(l.counts, tool, TOOL_SIZE)
  return at and struct.unpack('>I4', l.counts, at + 4) or 0, at
end

local function count_tool(l, tool, asked)
  local count, at = count_calls(l, tool)
  if at then
    local counted = struct.pack(TOOL, tool, math.min(count + 1, MAX))
    l.counts = sub(l.counts, 1, at - 1) .. counted .. sub(l.counts, at + TOOL_SIZE)
  elseif #l.counts < count_room(l, tool, asked.limited) * TOOL_SIZE then
    l.counts = l.counts .. struct.pack(TOOL, tool, 1)
    l.names = l.names .. find_name(asked.names, tool)
  end
end

local function pick_new(l, calls)
  local known, ids, new = l.records, {}, {}
  for at = 1, #known, RECORD do ids[sub(known, at, at + ID - 1)] = true end
  local forgot = l.tool_calls * RECORD > #known
  for at = 1, #calls, RECORD do
    if not ids[sub(calls, at, at + ID - 1)] then
      new[#new + 1] = sub(calls, at, at + RECORD - 1)
    elseif forgot then -- what stands before the first one that is known is older, and was counted once
      new, forgot = {}, false
    end
  end
  return table.concat(new)
end

local function learn(l, asked)
  local known, calls = l.records, asked.calls
  local new = sub(calls, 1, #known) == known and sub(calls, #known + 1) or pick_new(l, calls)
  for at = 1, #new, RECORD do count_tool(l, sub(new, at + ID, at + NAME - 1), asked) end
  l.tool_calls = math.min(l.tool_calls + #new / RECORD, MAX)
  l.records = sub(known .. new, -asked.records * RECORD)
end

local function count_equal(l, calls, window)
  local recent = sub(calls, -window * RECORD)
  local missing = window - #recent / RECORD
  if #recent > 0 and missing > 0 and l.records ~= calls then
    local shown, older = {}, {}
    for at = 1, #calls, RECORD do shown[sub(calls, at, at + ID - 1)] = true end
    for at = 1, #l.records, RECORD do
      if not shown[sub(l.records, at, at + ID - 1)] then older[#older + 1] = sub(l.records, at, at + RECORD - 1) end
    end
    recent = table.concat(older, '', math.max(1, #older - missing + 1)) .. recent
  end
  local newest, equal = sub(calls, NAME - RECORD), 0
  for at = 1, #recent, RECORD do
    if sub(recent, at + NAME, at + RECORD - 1) == newest then equal = equal + 1 end
  end
  return equal
end

local function judge(l, asked, retry)
  if l.killed == 1 then return 1, l.consecutive_blocks, asked.blocks end
  if l.killed > 0 then return 1, l.consecutive_errors, asked.errors end
  if asked.max_steps >= 0 and l.steps >= asked.max_steps and not retry then return 2, l.steps, asked.max_steps end
  local goes_on = not asked.narrows or (l.narrowed_at > 0 and l.narrowed_at < l.tool_calls)
  if asked.max_calls >= 0 and l.tool_calls > asked.max_calls and goes_on then return 3, l.tool_calls, asked.max_calls end
  if asked.max_cost >= 0 and l.cost + l.reserved >= asked.max_cost then return 4, l.cost + l.reserved, asked.max_cost end
  for at = 1, #asked.limited, TOOL_SIZE do
    local tool, allowed = struct.unpack(TOOL, asked.limited, at)
    local count = count_calls(l, tool)
    if count > allowed then return 5, count, allowed, tool end
  end
  if asked.threshold >= 0 then
    local equal = count_equal(l, asked.calls, asked.window)
    if equal >= math.max(asked.threshold, 1) then
      return 6, equal, asked.threshold, sub(asked.calls, ID - RECORD, NAME - RECORD - 1)
    end
  end
  return 0, 0, 0
end

local function block(l, asked)
  l.blocks = math.min(l.blocks + 1, MAX)
  l.consecutive_blocks = math.min(l.consecutive_blocks + 1, MAX)
  if l.killed == 0 and asked.blocks >= 0 and l.consecutive_blocks >= asked.blocks then l.killed = 1 end
end

local function let_through(l, asked, retry)
  if not retry then
    l.steps = math.min(l.steps + 1, MAX)
    l.identities = sub(l.identities .. asked.identity, -IDENTITIES * IDENTITY)
  end
  local bits = retry and RETRY or 0
  if not asked.narrows or l.tool_calls < asked.max_calls then
    l.narrowed_at = 0
  elseif l.narrowed_at == 0 then
    l.narrowed_at = l.tool_calls
    bits = bits + NARROWED
  end
  local quiet = math.min(math.max(0, asked.now - l.last), MAX)
  l.open = l.open .. struct.pack(RESERVATION, asked.call, asked.identity, asked.now, asked.money, quiet, l.consecutive_blocks,
    bits)
  l.reserved = l.reserved + asked.money
  l.consecutive_blocks, l.last = 0, asked.now
end

local function take_back(l, identity, begun, quiet, blocks, bits)
  l.consecutive_blocks = math.min(l.consecutive_blocks + blocks, MAX)
  if l.last == begun then l.last = l.last - quiet end
  if bits >= NARROWED then l.narrowed_at = 0 end
  if bits % NARROWED == RETRY then return end
  l.steps = l.steps - 1
  local at = find(l.identities, identity, IDENTITY)
  if at then l.identities = sub(l.identities, 1, at - 1) .. sub(l.identities, at + IDENTITY) end
end

local function close(l, at, asked)
  local _, identity, begun, reserve, quiet, blocks, bits = struct.unpack(RESERVATION, l.open, at)
  l.open = sub(l.open, 1, at - 1) .. sub(l.open, at + RESERVATION_SIZE)
  l.reserved = l.reserved - reserve
  if asked.kind == WITHDRAWN then return take_back(l, identity, begun, quiet, blocks, bits) end
  if asked.kind == REFUSED then
    take_back(l, identity, begun, quiet, blocks, bits)
    return block(l, asked)
  end
  pay(l, asked.money, asked.estimated and asked.money or 0)
  l.consecutive_errors = asked.kind == FAILED and math.min(l.consecutive_errors + 1, MAX) or 0
  if l.killed == 0 and asked.errors >= 0 and l.consecutive_errors >= asked.errors then l.killed = 2 end
end

local function describe(l, now, shared, retry, limit, used, allowed, tool)
  local standing = struct.pack(STANDING, limit, l.killed, shared and 1 or 0, retry and 1 or 0, tool or '\0\0\0\0', used, allowed,
    l.steps, l.tool_calls, l.blocks, l.consecutive_blocks, l.consecutive_errors, l.cost, l.estimated, l.reserved,
    math.max(0, now - l.began), #l.counts / TOOL_SIZE)
  return standing .. l.counts .. l.names
end

local function take_step(key, roster, shared_key, asked)
  local l = recall(key, asked)
  local shared = not l and roster and not enter(roster, asked)
  if shared then
    key = shared_key
    l = recall(key, asked)
  end
  l = l or make(asked.now)
  learn(l, asked)
  local retry = find(l.identities, asked.identity, IDENTITY) ~= nil
  local limit, used, allowed, tool = judge(l, asked, retry)
  if limit > 0 then block(l, asked) else let_through(l, asked, retry) end
  close_old(l, asked.now)
  keep(key, l, asked)
  return describe(l, asked.now, shared, retry, limit, used, allowed, tool)
end

local function settle(key, asked)
  local l = recall(key, asked)
  if not l then return describe(make(asked.now), asked.now, false, true, 0, 0, 0) end
  local at = find(l.open, asked.call, RESERVATION_SIZE)
  if at then close(l, at, asked) end
  close_old(l, asked.now)
  keep(key, l, asked)
  return describe(l, asked.now, false, not at, 0, 0, 0)
end

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers, next_key, at = {}, 1, 0

while next_key <= #KEYS do
  local asked, estimated, narrows = {now = tonumber(ARGV[at + 1])}, nil, nil
  asked.kind, estimated, narrows, asked.call, asked.identity, asked.money, asked.idle, asked.max_sessions, asked.max_steps,
    asked.max_calls, asked.max_cost, asked.window, asked.threshold, asked.blocks, asked.errors, asked.records =
    struct.unpack(ASKED, ARGV[at + 2])
  asked.estimated, asked.narrows = estimated == 1, narrows == 1
  asked.limited, asked.names, asked.calls = ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if asked.now == -1 then asked.now = server_now end
  if asked.kind == STEP then
    answers[#answers + 1] = take_step(KEYS[next_key], KEYS[next_key + 1], KEYS[next_key + 2], asked)
    next_key = next_key + 3
  else
    answers[#answers + 1] = settle(KEYS[next_key], asked)
    next_key = next_key + 1
  end
  if #ARGV > 5 then at = at + 5 end
end

return answers
