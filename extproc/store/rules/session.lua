-- session: lets requests of sessions through or refuses them, and settles those that were let through.
--
-- KEYS     for each step two keys, in one hash slot: the session's ledger, and the number of the caller's sessions; if it has
--          a place in a tree, also the key of that tree; if its session is to be found, also the agent's own key and its
--          parent's, as roots.lua has them; for each settlement the ledger's key. A single step may come with its first key
--          only; then the caller's sessions are not counted, its agents have no limits, and its session is the one in the key.
--          If a session is found, its ledger and tree are named like those in KEYS, in the same slot
-- ARGV     for each step or settlement, or once if they are the same for all, seven values: now_ms (-1: the server's clock);
--          the question, packed as ASKED, in which a settlement has its tokens and model_ms in place of records, earlier,
--          shown, newest and total; the tools that have limits, packed as TOOL; the names of tools in the history, each
--          with its digest and length before it; the newest tool calls in the history; the tools of older calls, packed as TOOL;
--          the place in the tree, packed as TREE_ASKED, or nothing; then the search for the session, packed as ROOT_ASKED, or nothing
-- returns  for each the session's state, packed as STANDING, its tree's as TREE_ANSWER if it has one, its name if it was to be
--          found, a number for each tool as TOOL, and the tools' names
--
-- tree.lua and root.lua are loaded before this file. Formats, rules and names are those of session.py. The value decides; the key's
-- own expiry only collects garbage.

local VERSION = 6
local HEAD, HEAD_SIZE = '>BI8I8I8I8I8I8I8I8I8I8I4I4I4I4I4I4I4I4I4I4BBBBBBI2I2', 131
local RESERVATION, RESERVATION_SIZE = '>c16c8I8I8I4I4B', 49
local TOOL, TOOL_SIZE = '>c4I4', 8
local BEGUN_VERSION = 1
local BEGUN, BEGUN_SIZE = '>BI8I8I4', 21
local MARK, MARK_SIZE, MARKS, NEWEST_MARKS = '>I2I6', 8, 256, 4
local ASKED = '>BBBc16c8I8I8I8i8i8i8i8i8i8i8I4I4I4I4I8'
local STANDING = '>BBBBc4i8i8I4I4I4I4I4I8I8I8I8I8I8I8I8I8I4I4I4B'

local RECORD, KNOWN, ID, NAME, NO_ID = 15, 11, 6, 10, '\0\0\0\0\0\0'
local FEW = 16
local MAX_SHOWN, SUM = 65535, 281474976710656
local IDENTITY, REPEATED, IDENTITIES, MAX_RETRIES_PER_STEP = 8, 9, 16, 3
local OPEN, OPEN_MS = 32, 600000
local TOOLS, MOST_TOOLS = 64, 255
local MAX, MAX_MONEY, MAX_RESERVE = 4294967295, 4503599627370496, 70368744177664
local MONEY = 4
local FAILED, REFUSED, STEP, WITHDRAWN, JOINED = 1, 2, 3, 4, 5
local CONVERSATION = 8
local RETRY, NARROWED = 1, 2
local ENDS, OFFERED, FINISHES, MEASURED = 2, 4, 16, 32
local CROWDED, IN_TREE, OF_ROOT, FIRST_OF_AGENTS = 1, 2, 4, 7
local ROOT_ASKED, ROOT_ASKED_SIZE = '>c8I4', 12
local OFFER, OFFERS_TOOLS, OFFERS_NONE = 64, 1, 2
local GARBAGE_MS = 1000
local MOST_HALVINGS = 6

local sub = string.sub

local function find(joined, start, width) -- the offset of the first item with this start among items of one width
  local at = string.find(joined, start, 1, true)
  while at and (at - 1) % width > 0 do at = string.find(joined, start, at + 1, true) end
  return at
end

local function get(key)
  local value = redis.pcall('GET', key) -- an error for a key of another program
  return type(value) == 'string' and value or ''
end

local function make(now, steps, halvings)
  return {
    last = now, began = now, cost = 0, estimated = 0, reserved = 0, input = 0, output = 0, cache_read = 0, cache_write = 0,
    model_ms = 0, steps = steps, tool_calls = 0, narrowed_at = 0, blocks = 0, consecutive_blocks = 0, consecutive_errors = 0,
    paid = 0, failures = 0, first_input = 0, newest_input = 0, killed = 0, renewed = 0, halvings = halvings, identities = '',
    open = '', counts = '', names = '', marks = '', records = '',
  }
end

local function unpack_ledger(value)
  if #value < HEAD_SIZE or string.byte(value) ~= VERSION then return nil end
  local l, _, identities, open, tools, names, marks, at = {}, nil, nil, nil, nil, nil, nil, nil
  _, l.last, l.began, l.cost, l.estimated, l.reserved, l.input, l.output, l.cache_read, l.cache_write, l.model_ms, l.steps,
    l.tool_calls, l.narrowed_at, l.blocks, l.consecutive_blocks, l.consecutive_errors, l.paid, l.failures, l.first_input,
    l.newest_input, l.killed, l.renewed, l.halvings, identities, open, tools, names, marks, at = struct.unpack(HEAD, value)
  identities, open, tools, marks = identities * REPEATED, open * RESERVATION_SIZE, tools * TOOL_SIZE, marks * MARK_SIZE
  local records = #value + 1 - at - identities - open - tools - names - marks
  if records < 0 or records % KNOWN > 0 then return nil end -- not written by Loopguard either
  local function cut(length)
    at = at + length
    return sub(value, at - length, at - 1)
  end
  l.identities, l.open, l.counts, l.names, l.marks, l.records =
    cut(identities), cut(open), cut(tools), cut(names), cut(marks), cut(records)
  return l
end

local function pack_ledger(l)
  local head = struct.pack(HEAD, VERSION, l.last, l.began, l.cost, l.estimated, l.reserved, l.input, l.output, l.cache_read,
    l.cache_write, l.model_ms, l.steps, l.tool_calls, l.narrowed_at, l.blocks, l.consecutive_blocks, l.consecutive_errors,
    l.paid, l.failures, l.first_input, l.newest_input, l.killed, l.renewed, l.halvings, #l.identities / REPEATED,
    #l.open / RESERVATION_SIZE, #l.counts / TOOL_SIZE, #l.names, #l.marks / MARK_SIZE)
  return table.concat({head, l.identities, l.open, l.counts, l.names, l.marks, l.records})
end

local function get_idle(l, asked) return math.floor(asked.idle / 2 ^ l.halvings) end

local function recall(key, asked)
  local value = get(key)
  local l = unpack_ledger(value)
  if l and math.abs(asked.now - (asked.ends and l.began or l.last)) < get_idle(l, asked) then return l end
  if value ~= '' then redis.call('DEL', key) end
  return nil
end

local function keep(key, l, asked)
  local lifetime = math.max(0, l.last + get_idle(l, asked) - asked.now) + GARBAGE_MS
  redis.call('SET', key, pack_ledger(l), 'PX', lifetime)
end

local function enter(key, asked)
  local value = get(key)
  local now, _, began, count, halvings = asked.now, nil, asked.now, 0, 0
  if #value == BEGUN_SIZE and string.byte(value) == BEGUN_VERSION then _, _, began, count = struct.unpack(BEGUN, value) end
  if math.abs(now - began) >= asked.idle then began, count = now, 0 end
  count = math.min(count + 1, MAX)
  if count > asked.max_sessions then
    local lasts = math.floor(math.abs(now - began) * asked.max_sessions / count)
    while halvings < MOST_HALVINGS and math.floor(asked.idle / 2 ^ halvings) > lasts do halvings = halvings + 1 end
  end
  redis.call('SET', key, struct.pack(BEGUN, BEGUN_VERSION, now, began, count), 'PX', asked.idle + GARBAGE_MS)
  return halvings
end

local function pay(l, cost, estimated)
  l.cost = math.min(l.cost + cost, MAX_MONEY)
  l.estimated = math.min(l.estimated + estimated, MAX_MONEY)
  if cost > 0 then l.paid = math.min(l.paid + 1, MAX) end
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

local function count_calls(l, tool)
  local at = find(l.counts, tool, TOOL_SIZE)
  return at and struct.unpack('>I4', l.counts, at + 4) or 0, at
end

local function read_names(names) -- each with its length before it
  local found, at = {}, 1
  while at < #names do
    local length = string.byte(names, at + 4)
    found[sub(names, at, at + 3)] = sub(names, at + 4, at + 4 + length)
    at = at + 5 + length
  end
  return found
end

local function count_tools(l, tools, numbers, asked)
  local places, counts = {}, {}
  for at = 1, #l.counts, TOOL_SIZE do
    counts[#counts + 1] = sub(l.counts, at, at + TOOL_SIZE - 1)
    places[sub(l.counts, at, at + 3)] = #counts
  end
  local limited, missing, names = nil, 0, nil -- tools with limits of their own, for which others leave room
  for _, tool in ipairs(tools) do
    local place = places[tool]
    if place then
      local count = struct.unpack('>I4', counts[place], 5)
      counts[place] = struct.pack(TOOL, tool, math.min(count + numbers[tool], MAX))
    else
      if not limited then
        limited, names = {}, read_names(asked.names)
        for at = 1, #asked.limited, TOOL_SIZE do
          local digest = sub(asked.limited, at, at + 3)
          if not places[digest] then limited[digest], missing = true, missing + 1 end
        end
      end
      if #counts < (limited[tool] and MOST_TOOLS or TOOLS - missing) then
        counts[#counts + 1] = struct.pack(TOOL, tool, numbers[tool])
        places[tool] = #counts
        l.names = l.names .. (names[tool] or '\0')
        if limited[tool] then limited[tool], missing = nil, missing - 1 end
      end
    end
  end
  l.counts = table.concat(counts)
end

local function read_pair(joined, at) return (struct.unpack('>I4', joined, at)) end

local function add_up(calls, start)
  local total = 0
  for at = start + NAME, #calls, RECORD do total = total + read_pair(calls, at) end
  return total
end

local function write_mark(shown, total) return struct.pack(MARK, math.min(shown, MAX_SHOWN), total % SUM) end

local function knows(l, name) return #name == ID and name ~= NO_ID and find(l.records, name, KNOWN) end

local function forgot(l) return l.tool_calls * KNOWN > #l.records end

local function find_mark(l, asked, calls, at) -- the end of the history that the mark at `at` describes
  if at < 1 then return nil end
  local shown, total = struct.unpack(MARK, l.marks, at)
  local ended = #calls - (asked.shown - shown) * RECORD
  return 0 < ended and ended <= #calls and total == asked.total - add_up(calls, ended + 1) and ended or nil
end

local function has_mark(l, shown, total) return find(l.marks, write_mark(shown, total), MARK_SIZE) end

local function are_newest(l, number, calls, ended) -- whether `number` calls up to `ended` are the newest that were counted
  local known = #l.records / KNOWN
  local length, total = math.min(number, known), 0
  if length > ended / RECORD or number > known and not forgot(l) then return false end
  for at = (known - length) * KNOWN + ID + 1, #l.records, KNOWN do total = total + read_pair(l.records, at) end
  for at = ended - length * RECORD + NAME + 1, ended, RECORD do total = total - read_pair(calls, at) end
  return total == 0
end

local function find_end(l, asked, calls, lasting) -- the end of the calls that are known by their position
  local ended = find_mark(l, asked, calls, #l.marks - MARK_SIZE + 1)
  if ended then return ended end
  if are_newest(l, asked.shown, calls, #calls) then return #calls end
  ended = math.max(0, #calls - asked.newest * RECORD)
  local older, total = asked.shown - asked.newest, asked.total - add_up(calls, ended + 1)
  local known = not lasting or has_mark(l, asked.shown, asked.total) or has_mark(l, older, total)
  return older > 0 and (known or older > 1 and are_newest(l, older, calls, ended)) and ended or nil
end

local function pick_new(l, asked, calls) -- the new calls, and whether all calls of the history are new
  local size = #calls
  for at = #l.marks - MARK_SIZE + 1, math.max(1, #l.marks - NEWEST_MARKS * MARK_SIZE + 1), -MARK_SIZE do
    local ended = find_mark(l, asked, calls, at)
    if ended and knows(l, sub(calls, ended - RECORD + 1, ended - RECORD + ID))
        and not knows(l, sub(calls, ended + 1, ended + ID)) then
      return sub(calls, ended + 1), false
    end
  end
  local ids, old, count, first, last, named = nil, {}, 0, nil, nil, false
  if size > FEW * RECORD then -- for fewer, searching each takes less time
    ids = {}
    for id in string.gmatch(l.records, '(......).....') do ids[id] = true end
  end
  for id in string.gmatch(calls, '(......).........') do
    count = count + 1
    old[count] = id == NO_ID
    if id ~= NO_ID then
      named = true
      if ids and ids[id] or not ids and knows(l, id) then first, last, old[count] = first or count, count, true end
    end
  end
  if last then
    l.renewed = 0
    local new = {}
    for number = forgot(l) and first or 1, last do
      if not old[number] then new[#new + 1] = sub(calls, (number - 1) * RECORD + 1, number * RECORD) end
    end
    return table.concat(new) .. sub(calls, last * RECORD + 1), false
  end
  local lasting = named and l.renewed == 0
  local ended = (asked.newest < asked.shown or not lasting) and find_end(l, asked, calls, lasting)
  if not ended then return calls, true end
  l.renewed = named and 1 or 0
  return sub(calls, ended + 1), false
end

local function count_one(l, new, asked) -- one new call, as for most steps
  local tool = sub(new, ID + 1, NAME)
  local count, at = count_calls(l, tool)
  if at then
    l.counts = sub(l.counts, 1, at + 3) .. struct.pack('>I4', math.min(count + 1, MAX)) .. sub(l.counts, at + TOOL_SIZE)
  else
    count_tools(l, {tool}, {[tool] = 1}, asked)
  end
  l.records = l.records .. sub(new, 1, ID) .. sub(new, NAME + 1)
end

local function count_all(l, new, asked, older)
  local tools, numbers = {}, {}
  for at = 1, #older, TOOL_SIZE do
    local tool, number = struct.unpack(TOOL, older, at)
    tools[#tools + 1], numbers[tool] = tool, number
  end
  for tool in string.gmatch(new, '......(....).....') do
    local number = numbers[tool]
    if not number then tools[#tools + 1] = tool end
    numbers[tool] = (number or 0) + 1
  end
  count_tools(l, tools, numbers, asked)
  local added = string.gsub(sub(new, -asked.records * RECORD), '(......)....(.....)', '%1%2')
  l.records = l.records .. added
end

local function learn(l, asked)
  local new, whole = asked.calls, l.tool_calls == 0
  if not whole then new, whole = pick_new(l, asked, new) end
  if #new == RECORD and not whole then
    count_one(l, new, asked)
  elseif #new > 0 then
    count_all(l, new, asked, whole and asked.older or '')
  end
  l.tool_calls = math.min(l.tool_calls + (whole and asked.shown or #new / RECORD), MAX)
  if #l.records > asked.records * KNOWN then l.records = sub(l.records, -asked.records * KNOWN) end
  local mark = write_mark(asked.shown, asked.total)
  local at = find(l.marks, mark, MARK_SIZE)
  if at then l.marks = sub(l.marks, 1, at - 1) .. sub(l.marks, at + MARK_SIZE) end
  l.marks = l.marks .. mark
  if #l.marks > MARKS * MARK_SIZE then l.marks = sub(l.marks, MARK_SIZE + 1) end
end

local function find_loop(l, asked) -- a call of the newest step that is repeated too often: how often, and its tool
  local calls, counts, back, at = asked.calls, {}, 0, #asked.calls - RECORD + 1
  while at >= 1 and back < asked.window do
    local pair = sub(calls, at + NAME, at + NAME + 3)
    counts[pair] = (counts[pair] or 0) + 1
    back, at = back + string.byte(calls, at + RECORD - 1), at - RECORD
  end
  local known, shown, ids = l.records, #calls / RECORD, {}
  if back < asked.window and #known > shown * KNOWN then
    if l.renewed == 1 or sub(calls, -RECORD, ID - RECORD - 1) == NO_ID then
      known = sub(known, 1, #known - shown * KNOWN)
    else
      for start = 1, #calls, RECORD do ids[sub(calls, start, start + ID - 1)] = true end
    end
    at = #known - KNOWN + 1
    while at >= 1 and back < asked.window do
      if not ids[sub(known, at, at + ID - 1)] then
        local pair = sub(known, at + ID, at + ID + 3)
        counts[pair] = (counts[pair] or 0) + 1
        back = back + string.byte(known, at + KNOWN - 1)
      end
      at = at - KNOWN
    end
  end
  for start = math.max(0, #calls - asked.newest * RECORD) + 1, #calls, RECORD do
    local equal = counts[sub(calls, start + NAME, start + NAME + 3)] or 0
    if equal >= math.max(asked.threshold, 1) then return equal, sub(calls, start + ID, start + NAME - 1) end
  end
end

local function count_others(l, asked) -- the number of calls of tools without limits of their own
  local others = l.tool_calls
  for at = 1, #asked.limited, TOOL_SIZE do others = others - count_calls(l, sub(asked.limited, at, at + 3)) end
  return math.max(0, others)
end

local function may_continue(l, asked, retry) -- without tool calls left: with tools that have limits of their own, or to finish
  if asked.finishes then return retry or l.narrowed_at == 0 end
  if not asked.narrows or l.narrowed_at > 0 and count_others(l, asked) >= l.narrowed_at then return false end
  for at = 1, #asked.limited, TOOL_SIZE do
    local tool, allowed = struct.unpack(TOOL, asked.limited, at)
    if count_calls(l, tool) < allowed then return true end
  end
  return false
end

local function find_limit(l, asked, retry)
  if l.killed == 1 then return 1, l.consecutive_blocks, asked.blocks end
  if l.killed > 0 then return 1, l.consecutive_errors, asked.errors end
  if asked.max_steps >= 0 and l.steps >= asked.max_steps and not retry then return 2, l.steps, asked.max_steps end
  if asked.max_calls >= 0 and l.tool_calls >= asked.max_calls and not may_continue(l, asked, retry) then
    return 3, l.tool_calls, asked.max_calls
  end
  if asked.max_cost >= 0 and l.cost + l.reserved >= asked.max_cost then return 4, l.cost + l.reserved, asked.max_cost end
  for at = 1, #asked.limited, TOOL_SIZE do
    local tool, allowed = struct.unpack(TOOL, asked.limited, at)
    local count = count_calls(l, tool)
    if count > allowed then return 5, count, allowed, tool end
  end
  if asked.threshold >= 0 and asked.newest > 0 then
    local equal, looping = find_loop(l, asked)
    if equal then return 6, equal, asked.threshold, looping end
  end
  return 0, 0, 0
end

local function block(l, asked, waits) -- waits: only reservations refuse the request
  l.blocks = math.min(l.blocks + 1, MAX)
  if waits then return end
  l.consecutive_blocks = math.min(l.consecutive_blocks + 1, MAX)
  if l.killed == 0 and asked.blocks >= 0 and l.consecutive_blocks >= asked.blocks then l.killed = 1 end
end

local function find_identity(l, identity) -- the offset of an identity, and the number of its repetitions
  local at = find(l.identities, identity, REPEATED)
  return at, at and string.byte(l.identities, at + IDENTITY)
end

local function drop_identity(l, identity)
  local at = find_identity(l, identity)
  return at and sub(l.identities, 1, at - 1) .. sub(l.identities, at + REPEATED) or l.identities
end

local function repeat_identity(l, identity, more)
  local at, times = find_identity(l, identity)
  if not at or times % OFFER + more < 0 then return end
  times = string.char(times + more)
  l.identities = sub(l.identities, 1, at + IDENTITY - 1) .. times .. sub(l.identities, at + REPEATED)
end

local function sort_out(l, asked, known)
  local has_tools, none = false, #l.identities / REPEATED == l.steps and l.steps <= MAX_RETRIES_PER_STEP
  for at = REPEATED, #l.identities, REPEATED do
    local offered = math.floor(string.byte(l.identities, at) / OFFER)
    has_tools, none = has_tools or offered == OFFERS_TOOLS, none and offered == OFFERS_NONE
  end
  if asked.offer == OFFERS_NONE then
    return has_tools and not known and sub(l.identities, -REPEATED, -2) or asked.identity
  end
  if not has_tools and none then
    l.steps, l.first_input, l.newest_input, l.identities = 0, 0, 0, ''
    local open = {}
    for at = 1, #l.open, RESERVATION_SIZE do
      local bits = string.byte(l.open, at + RESERVATION_SIZE - 1)
      bits = bits % NARROWED == RETRY and bits or bits + RETRY
      open[#open + 1] = sub(l.open, at, at + RESERVATION_SIZE - 2) .. string.char(bits)
    end
    l.open = table.concat(open)
  end
  return asked.identity
end

local function let_through(l, asked, identity, retry)
  if retry then
    repeat_identity(l, identity, 1)
  else
    l.steps = math.min(l.steps + 1, MAX)
    l.identities = sub(drop_identity(l, identity) .. identity .. string.char(asked.offer * OFFER), -IDENTITIES * REPEATED)
  end
  local bits = retry and RETRY or 0
  if l.tool_calls < asked.max_calls then
    l.narrowed_at = 0
  elseif asked.max_calls >= 0 and l.narrowed_at == 0 and not retry then
    l.narrowed_at = math.min(count_others(l, asked) + 1, MAX)
    bits = bits + NARROWED
  end
  local quiet = math.min(math.max(0, asked.now - l.last), MAX)
  local reserve = asked.money
  if l.paid > 0 then reserve = math.min((l.cost - l.cost % l.paid) / l.paid, MAX_RESERVE) end -- the average
  l.open = l.open .. struct.pack(RESERVATION, asked.call, identity, asked.now, reserve, quiet, l.consecutive_blocks, bits)
  l.reserved = l.reserved + reserve
  l.consecutive_blocks, l.last = 0, asked.now
  return reserve
end

local function take_back(l, identity, begun, quiet, blocks, bits)
  l.consecutive_blocks = math.min(l.consecutive_blocks + blocks, MAX)
  if l.last == begun then l.last = l.last - quiet end
  if bits >= NARROWED then l.narrowed_at = 0 end
  if bits % NARROWED == RETRY then return repeat_identity(l, identity, -1) end
  l.steps = math.max(l.steps - 1, 0)
  l.identities = drop_identity(l, identity)
end

local function close(l, at, asked)
  local _, identity, begun, reserve, quiet, blocks, bits = struct.unpack(RESERVATION, l.open, at)
  l.open = sub(l.open, 1, at - 1) .. sub(l.open, at + RESERVATION_SIZE)
  l.reserved = l.reserved - reserve
  if asked.kind == WITHDRAWN or asked.kind == JOINED then return take_back(l, identity, begun, quiet, blocks, bits) end
  if asked.kind == REFUSED then
    take_back(l, identity, begun, quiet, blocks, bits)
    return block(l, asked)
  end
  pay(l, asked.money, asked.estimated and asked.money or 0)
  l.input, l.output = l.input + asked.records, l.output + asked.earlier
  l.cache_read, l.cache_write = l.cache_read + asked.shown, l.cache_write + asked.newest
  l.model_ms = l.model_ms + asked.total
  local input = asked.records + asked.shown + asked.newest
  if asked.measured and input > 0 and bits % NARROWED ~= RETRY then
    l.newest_input = math.min(input, MAX)
    if l.first_input == 0 then l.first_input = l.newest_input end
  end
  if asked.kind == FAILED then l.failures = math.min(l.failures + 1, MAX) end
  l.consecutive_errors = asked.kind == FAILED and math.min(l.consecutive_errors + 1, MAX) or 0
  if l.killed == 0 and asked.errors >= 0 and l.consecutive_errors >= asked.errors then l.killed = 2 end
end

local function describe(l, now, retry, limit, used, allowed, tool, tree, root)
  local bits = (l.halvings > 0 and CROWDED or 0) + (tree and IN_TREE or 0) + (root and OF_ROOT or 0)
  local standing = struct.pack(STANDING, limit, l.killed, bits, retry and 1 or 0, tool or '\0\0\0\0', used, allowed,
    l.steps, l.tool_calls, l.blocks, l.consecutive_blocks, l.consecutive_errors, l.cost, l.estimated, l.reserved,
    math.max(0, now - l.began), l.input, l.output, l.cache_read, l.cache_write, l.model_ms, l.failures,
    l.first_input, l.newest_input, #l.counts / TOOL_SIZE)
  return standing .. (tree or '') .. (root or '') .. l.counts .. l.names
end

local function keep_tree(key, tree, asked)
  if tree == '' then redis.call('DEL', key) else redis.call('SET', key, tree, 'PX', asked.idle + GARBAGE_MS) end
end

local function write_hex(name)
  return (string.gsub(name, '.', function(byte) return string.format('%02x', string.byte(byte)) end)) .. ':'
end

local function move_key(key, old, new) -- the key of the same state of another session
  local from, to = string.find(key, old, 1, true)
  return from and sub(key, 1, from - 1) .. new .. sub(key, to + 1) or key
end

local function move_step(key, tree_key, asked, root) -- see session.py
  if root == asked.parent then return key, tree_key end
  local old, new = write_hex(asked.parent), write_hex(root)
  if tree_key then
    asked.tree.parent = asked.parent
    if asked.tree.agent == root then asked.tree.agent, asked.tree.parent = ROOT, ROOT end
    tree_key = move_key(tree_key, old, new)
  end
  return move_key(key, old, new), tree_key
end

local function take_step(key, caller, tree_key, own_key, parent_key, asked)
  local root = nil
  if own_key then
    root = find_root(own_key, parent_key, asked.parent, asked.root_ttl)
    key, tree_key = move_step(key, tree_key, asked, root)
  end
  local l = recall(key, asked)
  l = l or make(asked.now, asked.earlier, caller and enter(caller, asked) or 0)
  close_old(l, asked.now)
  local known, times = find_identity(l, asked.identity)
  if not known and #asked.calls > 0 then learn(l, asked) end -- the same request shows the same calls
  local identity = asked.identity
  if asked.offer > 0 then
    identity = sort_out(l, asked, known)
    known, times = find_identity(l, identity)
  end
  local retry = known ~= nil and times % OFFER < MAX_RETRIES_PER_STEP
  local limit, used, allowed, tool = find_limit(l, asked, retry)
  local tree, answer, agent_limit, agents_used, agents_allowed = nil, nil, nil, nil, nil
  if tree_key then
    tree, answer, agent_limit, agents_used, agents_allowed = admit(get(tree_key), asked.tree, l.began, asked.now, limit == 0)
    keep_tree(tree_key, tree, asked)
  end
  if limit > 0 then
    block(l, asked, limit == MONEY and l.cost < allowed)
  elseif agent_limit then
    l.blocks = math.min(l.blocks + 1, MAX)
    limit, used, allowed = FIRST_OF_AGENTS + agent_limit, agents_used, agents_allowed
  else
    used = let_through(l, asked, retry and identity or asked.identity, retry)
  end
  close_old(l, asked.now)
  if l.halvings > 0 and (l.killed > 0 or l.blocks > 0 or find_limit(l, asked, false) > 0) then l.halvings = 0 end
  keep(key, l, asked)
  return describe(l, asked.now, retry, limit, used, allowed, tool, answer, root)
end

local function settle(key, asked)
  local l = recall(key, asked)
  if not l then return describe(make(asked.now, 0, 0), asked.now, true, 0, 0, 0) end
  local joins = asked.kind == JOINED
  local at = find(l.open, joins and sub(asked.call, 1, CONVERSATION) or asked.call, RESERVATION_SIZE)
  if at then
    close(l, at, asked)
  elseif joins then
    l.steps, l.cost = math.max(l.steps - 1, 0), math.max(l.cost - asked.money, 0)
    l.estimated = math.min(l.estimated, l.cost)
    if asked.money > 0 then l.paid = math.max(l.paid - 1, 0) end
  end
  close_old(l, asked.now)
  if l.killed > 0 or (asked.max_cost >= 0 and l.cost + l.reserved >= asked.max_cost) then l.halvings = 0 end
  keep(key, l, asked)
  return describe(l, asked.now, not at, 0, 0, 0)
end

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers, next_key, at = {}, 1, 0

while next_key <= #KEYS do
  local asked, estimated, flags = {now = tonumber(ARGV[at + 1])}, nil, nil
  asked.kind, estimated, flags, asked.call, asked.identity, asked.money, asked.idle, asked.max_sessions, asked.max_steps,
    asked.max_calls, asked.max_cost, asked.window, asked.threshold, asked.blocks, asked.errors, asked.records,
    asked.earlier, asked.shown, asked.newest, asked.total = struct.unpack(ASKED, ARGV[at + 2])
  asked.estimated, asked.narrows, asked.ends = estimated == 1, flags % ENDS == 1, flags % OFFERED >= ENDS
  asked.offer = math.floor(flags % FINISHES / OFFERED)
  asked.finishes, asked.measured = flags % MEASURED >= FINISHES, flags >= MEASURED
  asked.limited, asked.names, asked.calls, asked.older = ARGV[at + 3], ARGV[at + 4], ARGV[at + 5], ARGV[at + 6]
  local keys, place = 2, ARGV[at + 7]
  local tree_key, own_key, parent_key = nil, nil, nil
  if #place >= TREE_ASKED_SIZE then
    tree_key = KEYS[next_key + keys]
    keys, asked.tree = keys + 1, read_tree_question(place)
  end
  if #place % TREE_ASKED_SIZE > 0 then
    own_key, parent_key = KEYS[next_key + keys], KEYS[next_key + keys + 1]
    keys = keys + 2
    asked.parent, asked.root_ttl = struct.unpack(ROOT_ASKED, place, #place - ROOT_ASKED_SIZE + 1)
  end
  if asked.now == -1 then asked.now = server_now end
  if asked.kind == STEP then
    answers[#answers + 1] = take_step(KEYS[next_key], KEYS[next_key + 1], tree_key, own_key, parent_key, asked)
    next_key = next_key + keys
  else
    answers[#answers + 1] = settle(KEYS[next_key], asked)
    next_key = next_key + 1
  end
  if #ARGV > 7 then at = at + 7 end
end

return answers
