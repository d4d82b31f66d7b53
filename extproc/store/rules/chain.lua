-- chain: adds a turn to each of several conversations, which are identified by the history in their requests.
--
-- KEYS     for each turn, all in one hash slot: its node, the caller's usage, its parent's suffix, its own and its answer (the
--          node's key if there is none), and its possible parents, longest history first. A single turn may come with its first
--          key only; then it begins a conversation, and nothing is charged. With an answer, the parent's answer replaces its
--          suffix
-- ARGV     for each turn, or once if they are the same for all, eleven values: the node (8 bytes), the number of parents, how
--          many of these are near, whether there is a suffix of the parent, one of the node, and an answer (1 or 0 for each), the
--          entry, ttl_ms, most (bytes), the fresh name, now_ms (-1: the server's clock)
-- returns  for each turn a byte of flags (1 whole, 4 dropped, 8 named), the name if there is one, and its conversation's entries,
--          each with a byte for its length
--
-- Formats, rules and names are those of chain.py. The value decides; the key's own expiry only
-- collects garbage.

local VERSION = 2
local HEAD, HEAD_SIZE = '>BBI8I4I4c8c8c8BBc8B', 53
local USAGE, USAGE_SIZE = '>BBI8I4I8', 22
local MAX_ENTRIES, MAX_RETRIES, MAX_RUNS, MOST_SENT_AGAIN = 32, 3, 255, 2
local CUT_MS, FIRST_MS, OVERHEAD, GARBAGE_MS = 120000, 600000, 128, 1000
local WHOLE, AMBIGUOUS, DROPPED, NAMED, CONTINUED = 1, 2, 4, 8, 16
local NONE, ARGUMENTS, WIDTH = '\0\0\0\0\0\0\0\0', 11, 5 -- the keys beside the parents
local NAME, MAX_NAMES = 8, 32

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function has(flags, flag) return math.floor(flags / flag) % 2 == 1 end

local function get(key)
  local value = redis.pcall('GET', key) -- an error for a key of another program
  return type(value) == 'string' and value or ''
end

local function open(key, now)
  local value = get(key)
  if #value < HEAD_SIZE or string.byte(value) ~= VERSION then return nil end
  local k, _, names, at = {}, nil, nil, nil
  _, k.flags, k.last, k.life, k.depth, k.conversation, k.writer, k.next, k.runs, k.retries, k.name, names, at =
    struct.unpack(HEAD, value)
  if math.abs(now - k.last) >= k.life then return nil end
  k.names = string.sub(value, at, at + names * NAME - 1)
  k.entries = string.sub(value, at + names * NAME)
  return k
end

local function make(flags, depth, conversation, writer, entries)
  return {
    flags = flags, last = 0, life = 0, depth = depth, conversation = conversation, writer = writer, next = NONE, runs = 0,
    retries = 0, name = NONE, names = '', entries = entries,
  }
end

local function write(key, k)
  local head = struct.pack(HEAD, VERSION, k.flags, k.last, k.life, k.depth, k.conversation, k.writer, k.next, k.runs, k.retries,
    k.name, #k.names / NAME)
  redis.call('SET', key, head .. k.names .. k.entries, 'PX', k.life + GARBAGE_MS)
end

local function measure(k) return OVERHEAD + HEAD_SIZE + #k.names + #k.entries end
local function claim(k) k.runs = math.max(k.runs - 1, 0) end
local function stand(k) k.runs = math.min(k.runs + 1, MAX_RUNS) end

local function take(k, name)
  for at = 1, #k.names, NAME do
    if string.sub(k.names, at, at + NAME - 1) == name then
      k.names = string.sub(k.names, 1, at - 1) .. string.sub(k.names, at + NAME)
      return true
    end
  end
  return false
end

local function give(k, name)
  take(k, name)
  k.name = name
  k.names = string.sub(k.names .. name, -MAX_NAMES * NAME)
end

local function count_entries(entries) -- and where the last begins
  local kept, at, newest = 0, 1, 1
  while at <= #entries do
    kept, newest = kept + 1, at
    at = at + 1 + string.byte(entries, at)
  end
  return kept, newest
end

local function find_name(node, parent, before, is_root, entry, fresh) -- and whether it reaches the node now, and is a fork
  if parent and parent.names ~= '' then return string.sub(parent.names, 1, NAME), true end
  local link = not parent and before or nil
  if link and link.names ~= '' then return string.sub(link.names, 1, NAME), true end
  if node and not is_root then
    local _, at = count_entries(node.entries)
    local newest = string.sub(node.entries, at + 1)
    if newest ~= '' and string.byte(newest) == string.byte(entry) and newest ~= entry then return entry, true, true end
    if node.names ~= '' then return string.sub(node.names, 1, NAME), false end
    return node.name ~= NONE and node.name or '', false
  end
  if link and has(link.flags, AMBIGUOUS) then return '', false end
  return fresh, true
end

local function add(entries, entry)
  local start = 1
  if count_entries(entries) >= MAX_ENTRIES then start = 2 + string.byte(entries) end
  return string.sub(entries, start) .. string.char(#entry) .. entry
end

local function split(entries)
  local parts, at = {}, 1
  while at <= #entries do
    local size = string.byte(entries, at)
    parts[#parts + 1] = string.sub(entries, at + 1, at + size)
    at = at + 1 + size
  end
  return parts
end

local function leave_common(one, other)
  local first, second = split(one), split(other)
  local kept, count = {}, math.min(#first, #second)
  for place = 1, count do
    local entry = first[#first - count + place]
    if entry ~= second[#second - count + place] then entry = '' end
    kept[place] = string.char(#entry) .. entry
  end
  return table.concat(kept)
end

local function go_on(node, before, id, entry, stays, first)
  local entries, depth, runs = before.entries, before.depth + 1, math.max(before.runs, 1)
  local most = math.min(MAX_RETRIES * runs, MAX_RUNS - 1)
  if not stays then
    before.retries = before.retries - math.floor(before.retries / runs)
    before.runs = runs - 1
  elseif before.retries > most then
    before.retries = before.retries - (runs - 1)
  else
    if before.retries > 0 then
      local _, newest = count_entries(entries)
      entries, depth = string.sub(entries, 1, newest - 1), before.depth
    end
    before.retries = before.retries + 1
  end
  local made = make(before.flags, depth, before.conversation, id, add(entries, entry))
  made.life = first
  if node then made.next, made.runs, made.name, made.names = node.next, node.runs, node.name, node.names end
  return made
end

local function is_retry(node, base, entry)
  if not base or base.runs == 0 then return true end
  return node.retries < MAX_RETRIES and leave_common(node.entries, add(base.entries, entry)) == node.entries
end

local function repeat_turn(node, before, entry, counts) -- and its entries
  if node.retries < MAX_RETRIES or not counts then
    node.retries = math.min(node.retries + 1, MAX_RETRIES)
    local _, newest = count_entries(node.entries)
    local entries = string.sub(node.entries, 1, newest - 1) .. string.char(#entry) .. entry
    if newest < #node.entries then node.entries = entries end
    return entries
  end
  local base = node
  if before and not has(before.flags, AMBIGUOUS) and before.conversation == node.conversation and before.depth > node.depth then
    base = before
  end
  node.entries, node.depth = add(base.entries, entry), base.depth + 1
  return node.entries
end

local function make_suffix(old, node, id)
  local mine = old and old.writer == id
  if old and (has(old.flags, AMBIGUOUS) or (not mine and (old.conversation ~= node.conversation or old.runs > 0))) then
    return make(AMBIGUOUS, 0, old.conversation, old.writer, '')
  end
  local suffix = make(node.flags, node.depth, node.conversation, id, node.entries)
  suffix.runs, suffix.name, suffix.names = node.runs, node.name, node.names
  if mine then suffix.next = old.next end
  return suffix
end

local function make_answer(old, node, id, stays)
  local answer = make(node.flags, node.depth, node.conversation, id, node.entries)
  answer.runs = 1
  if stays then
    answer.retries = 1
    if old then answer.runs, answer.retries = math.max(old.runs, 1), math.max(old.retries, 1) end
  elseif old then
    answer.runs = math.min(old.runs + 1, MAX_RUNS)
    if old.runs > MOST_SENT_AGAIN and old.depth < node.depth then answer.entries, answer.depth = old.entries, old.depth end
  end
  return answer
end

local function charge(key, cost, most, window, now)
  local value, started, used = get(key), now, 0
  if #value == USAGE_SIZE and string.byte(value) == VERSION then
    local _, life
    _, _, started, life, used = struct.unpack(USAGE, value)
    if math.abs(now - started) >= life then started, used = now, 0 end
  end
  if used + cost > most then return false end
  redis.call('SET', key, struct.pack(USAGE, VERSION, 0, started, window, used + cost), 'PX', window + GARBAGE_MS)
  return true
end

local function follow(keys, id, is_root, near, has_before, has_own, has_answer, entry, ttl, most, fresh, now)
  local node, last, before = open(keys[1], now), has_before and open(keys[3], now) or nil, nil
  local is_own, stays = has_own and keys[3] == keys[4], has_answer and keys[3] == keys[5]
  local is_continued = last ~= nil and not ((is_own or stays) and last.depth <= 1 and last.writer == id)
  local known = is_continued and has_own and not has(last.flags, AMBIGUOUS) and not (has_answer and fresh ~= '')
  if known or (is_continued and not has_answer) then before = last end
  local parent, parent_key, left = nil, nil, false
  for place = WIDTH + 1, known and math.min(WIDTH + near, #keys) or #keys do
    parent, parent_key = open(keys[place], now), keys[place]
    if parent and has_answer and known and parent.runs == 0 and parent.conversation == last.conversation then
      parent, left = nil, true
    end
    if parent then break end
  end
  if parent and has_answer then before = nil end
  local is_retried = before and left and node and not stays and before.last < node.last
  is_continued = is_continued or parent ~= nil or (node ~= nil and has(node.flags, CONTINUED))
  local claims, first = parent and parent.runs > 0, math.min(FIRST_MS, ttl)
  local linked = known and not parent and not is_retried
  local base = linked and before or parent
  local is_new, begins, changed, shown = not node, false, {}, nil
  local name, comes, forks = '', false, false
  if fresh ~= '' then name, comes, forks = find_name(node, parent, before, is_root, entry, fresh) end
  if is_root then
    if not node then
      node, begins = make(WHOLE, 0, id, id, ''), true
      node.life = first
    end
  elseif before and has_answer and not is_retried then
    node = go_on(node, before, id, entry, stays, first)
    changed[1] = { keys[3], before }
  elseif node and (forks or is_retry(node, base, entry)) then
    local counts = not is_retried and is_continued and (not base or has(base.flags, WHOLE))
    shown = not forks and repeat_turn(node, before, entry, counts) or nil
  else
    local stood = node
    if base then
      begins = base.next ~= NONE and base.next ~= id
      node = make(
        (claims or linked) and base.flags or 0, base.depth + 1, begins and id or base.conversation, id, add(base.entries, entry)
      )
      if not begins then base.next = id end
      claim(base)
      changed[1] = { linked and keys[3] or parent_key, base }
      if not linked and before and before.writer == base.writer then
        claim(before)
        changed[2] = { keys[3], before }
      end
      for _, change in ipairs(changed) do
        if change[2].runs == 0 then change[2].last, change[2].life = now, math.min(CUT_MS, ttl) end
      end
    else
      node, begins = make(0, 1, id, id, add('', entry)), true
    end
    shown = node.entries
    node.life = base and not linked and ttl or first
    if stood then
      begins = false
      node.conversation, node.next, node.runs = stood.conversation, stood.next, stood.runs
      node.retries = linked and stood.retries or 0
      node.name, node.names = stood.name, stood.names
      if node.depth == stood.depth then node.entries = leave_common(stood.entries, shown) end
    end
  end
  stand(node)
  if is_continued and not has(node.flags, CONTINUED) then node.flags = node.flags + CONTINUED end
  if comes then
    if parent and take(parent, name) then changed[#changed + 1] = { parent_key, parent } end
    if before and take(before, name) then changed[#changed + 1] = { keys[3], before } end
  end
  if name ~= '' and (comes or node.names ~= '') then give(node, name) end
  node.last = now
  changed[#changed + 1] = { keys[1], node }
  local cost = measure(node)
  local lasts = has_own and node.depth > 1 and ttl or node.life
  if has_own and not is_retried then
    local old = last
    if not is_own then old = open(keys[4], now) end
    local suffix = make_suffix(old, node, id)
    suffix.last, suffix.life = now, lasts
    changed[#changed + 1] = { keys[4], suffix }
    cost = cost + measure(suffix)
  end
  if has_answer and not is_retried then
    local old, answer = last, nil
    if has_own and not stays then old = open(keys[5], now) end
    if has_own then answer = make_answer(old, node, id, stays) else answer = make(AMBIGUOUS, 0, id, id, '') end
    answer.last, answer.life = now, lasts
    changed[#changed + 1] = { keys[5], answer }
    cost = cost + measure(answer)
  end
  if not begins then
    cost, most = math.floor(cost * CUT_MS / FIRST_MS), most * 2
  end
  local dropped = is_new and keys[2] and not charge(keys[2], cost, most, first, now)
  if not dropped then
    for _, change in ipairs(changed) do write(change[1], change[2]) end
  end
  return string.char(node.flags % 2 + (dropped and DROPPED or 0) + (name ~= '' and NAMED or 0)) .. name .. (shown or node.entries)
end

local single, answers, first = #KEYS == 1, {}, 0
while first < #KEYS do
  local at = #ARGV == ARGUMENTS and 0 or #answers * ARGUMENTS
  local width, keys, now = single and 1 or WIDTH + ARGV[at + 2], {}, tonumber(ARGV[at + 11])
  for place = 1, width do keys[place] = KEYS[first + place] end
  first = first + width
  if now == -1 then now = server_now end
  local is_root, near = ARGV[at + 2] == '0', tonumber(ARGV[at + 3])
  local has_answer = not single and ARGV[at + 6] == '1'
  local has_before, has_own = not single and ARGV[at + 4] == '1', not single and ARGV[at + 5] == '1'
  local entry, ttl, most, fresh = ARGV[at + 7], tonumber(ARGV[at + 8]), tonumber(ARGV[at + 9]), ARGV[at + 10]
  answers[#answers + 1] = follow(keys, ARGV[at + 1], is_root, near, has_before, has_own, has_answer, entry, ttl, most, fresh, now)
end
return answers
