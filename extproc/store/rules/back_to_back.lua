-- back_to_back: the newest requests of a key as intervals, and the length of the run that ends with a new one.
--
-- KEYS     one or more counter keys, all in one hash slot
-- ARGV     for each key, six words: the request's name (8 bytes), what to do (-3: it begins; else as lasted_ms in
--          back_to_back.py), window_ms, threshold, cooldown_ms, now_ms (-1: the server's clock)
-- returns  one string, for each key four integers of 8, 1, 8 and 8 bytes, big-endian: count, looping (1 or 0), cooldown left in
--          ms, span in ms; zeros for a request that has ended
--
-- A key's value is a version, the count at the oldest interval and cooling_until, then for each interval its start, its duration
-- plus one (0: not ended) and its name, packed. The arithmetic is that of back_to_back.py.

local VERSION = 1
local FORMAT, SIZE = '>BI4I8', 13
local ONE, ONE_SIZE = '>I8I8c8', 24
local ANSWER = '>I8BI8I8'
local GARBAGE_MS = 1000
local MOST, TOLERANCE_MS, LEAST_TOLERANCE_MS, LATE_MS, LOST_MS = 32, 500, 100, 5000, 600000
local BEGINS, LEFT_OUT = -3, -1
local REFUSED = string.rep('\0', 8)

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers = {}

local function read(key)
  local value = redis.pcall('GET', key)
  local intervals = {}
  if type(value) ~= 'string' or #value < SIZE or string.byte(value) ~= VERSION then
    if type(value) == 'table' then redis.call('DEL', key) end -- not written by Loopguard
    return nil, 0, intervals
  end
  local _, oldest, cooling = struct.unpack(FORMAT, value)
  for at = SIZE + 1, #value - ONE_SIZE + 1, ONE_SIZE do
    local start, lasted, name = struct.unpack(ONE, value, at)
    intervals[#intervals + 1] = { start, lasted, name }
  end
  return oldest, cooling, intervals
end

local function pack(oldest, cooling, intervals)
  local parts = { struct.pack(FORMAT, VERSION, oldest, cooling) }
  for place, one in ipairs(intervals) do parts[place + 1] = struct.pack(ONE, one[1], one[2], one[3]) end
  return table.concat(parts)
end

local function count(oldest, intervals, window, now) -- returns the last count, the second, and the start of the newest run
  local began, reach, busy, unknown, run, second = intervals[1][1], 0, 0, false, oldest, oldest
  for place, one in ipairs(intervals) do
    local start, lasted = one[1], one[2]
    if place > 1 then
      local adds = one[3] == REFUSED and 0 or 1
      if start < busy or (not unknown and start > reach + window) then
        run, began = adds, start
      elseif not unknown or place == #intervals then
        run = run + adds
      end
      if place == 2 then second = run end
    end
    local known = lasted > 0 and lasted - 1 or math.max(0, now - LATE_MS - start)
    local tolerance = math.min(TOLERANCE_MS, math.max(LEAST_TOLERANCE_MS, math.floor(known / 2)))
    reach, busy = math.max(reach, start + known), math.max(busy, start + known - tolerance)
    unknown = unknown or lasted == 0
  end
  return run, second, began
end

local function finish(key, name, lasted, window)
  local oldest, cooling, intervals = read(key)
  if name == REFUSED then return end
  for place, one in ipairs(intervals) do
    if one[3] == name then
      local before = intervals[place - 1]
      if lasted >= 0 then
        one[2] = lasted + 1
      elseif lasted == LEFT_OUT then
        table.remove(intervals, place)
        if place == 1 and intervals[1] and intervals[1][3] == REFUSED then oldest = oldest - 1 end
      elseif before and before[3] == REFUSED and one[1] <= before[1] + before[2] - 1 + window then
        before[2] = one[1] - before[1] + 1
        table.remove(intervals, place)
      else
        one[2], one[3] = 1, REFUSED
        if place == 1 then oldest = oldest - 1 end
      end
      redis.call('SET', key, pack(oldest, cooling, intervals), 'KEEPTTL')
      return
    end
  end
end

for i, key in ipairs(KEYS) do
  local at = #ARGV == 6 and 0 or (i - 1) * 6
  local name, lasted, window = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local threshold, cooldown, now = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  if now == -1 then now = server_now end
  if lasted ~= BEGINS then
    finish(key, name, lasted, window)
    answers[i] = struct.pack(ANSWER, 0, 0, 0, 0)
  else
    local oldest, cooling, intervals = read(key)
    local newest = intervals[#intervals]
    if newest and newest[1] > now + TOLERANCE_MS then intervals, newest = {}, nil end -- the clock was set back
    local start = newest and math.max(now, newest[1]) or now
    local kept = {}
    for _, one in ipairs(intervals) do
      if one[2] > 0 or one[1] > now - LOST_MS then kept[#kept + 1] = one end
    end
    kept[#kept + 1] = { start, 0, name }
    if #kept == 1 then oldest = 1 end
    local seen, second, began = count(oldest, kept, window, now)
    if #kept > MOST then
      oldest = second
      table.remove(kept, 1)
    end
    local ahead, looping = cooling - cooldown - now, false
    if ahead > 0 then cooling = ahead < cooldown and now + cooldown or 0 end
    if now >= cooling and threshold <= seen then
      looping, cooling = true, now + cooldown
    else
      looping = now < cooling or seen >= threshold
    end
    local lifetime = math.max(window + LOST_MS, cooldown) + GARBAGE_MS
    redis.call('SET', key, pack(math.min(oldest, 4294967295), cooling, kept), 'PX', lifetime)
    answers[i] = struct.pack(ANSWER, seen, looping and 1 or 0, math.max(0, cooling - now), start - began)
  end
end

return table.concat(answers)
