-- tally: windows with one count for each key. In a sliding_ttl window, every counted request resets the time to live. A fixed
-- window starts with the first request and ends window_ms later.
--
-- KEYS     one or more counter keys, all in one hash slot
-- ARGV     for each key, or once if they are the same for all, seven integers: window_ms, threshold, cooldown_ms,
--          count_refused (1 or 0), fixed (1, or 0 for sliding_ttl), times (number of requests to count),
--          now_ms (-1: the server's clock)
-- returns  one string, for each key five integers of 8, 1, 8, 8 and 8 bytes, big-endian: count, looping (1 or 0), cooldown left
--          in ms, span in ms, and for how many ms a looping verdict would last if nothing more were counted
--
-- A key's value is a version, count, first, last and cooling_until, packed; the times are milliseconds. The value decides; the
-- key's own expiry only collects garbage. The arithmetic is that of windows.py, request by request.

local VERSION = 1
local FORMAT, SIZE = '>BI4I8I8I8', 29
local ANSWER = '>I8BI8I8I8'
local GARBAGE_MS = 1000

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers = {}

for i, key in ipairs(KEYS) do
  local at = #ARGV == 7 and 0 or (i - 1) * 7
  local window, threshold, cooldown = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local count_refused, fixed = ARGV[at + 4] == '1', ARGV[at + 5] == '1'
  local times, now = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  if now == -1 then now = server_now end

  local count, first, last, cooling = 0, now, now, 0
  local value = redis.pcall('GET', key) -- an error for a key of another program
  if type(value) == 'string' and #value == SIZE and string.byte(value) == VERSION then
    local _
    _, count, first, last, cooling = struct.unpack(FORMAT, value)
  end
  if now < last then -- the clock was set back
    if last - now < window then first, last = first - (last - now), now else count, first, last = 0, now, now end
  end
  local ahead = cooling - cooldown - now
  if ahead > 0 then cooling = ahead < cooldown and now + cooldown or 0 end

  local seen, began, looping = 0, now, false
  for _ = 1, times do
    local before = 0
    began = now
    if count > 0 and now < (fixed and first or last) + window then before, began = count, first end
    seen = before + 1
    if now >= cooling and before < threshold and threshold <= seen then
      looping, cooling = true, now + cooldown
    else
      looping = now < cooling or seen >= threshold
    end
    if looping and not count_refused then break end
    count, first, last = seen, began, now
  end

  local over, certain = (fixed and first or last) + window, count >= threshold
  if not count_refused and cooldown == 0 then certain = count >= threshold - 1 end -- else the next one trips
  local stands = math.max(cooling, certain and over or 0) - now
  local lifetime = math.max(over, cooling) - now + GARBAGE_MS
  count = math.min(count, 4294967295)
  local packed = struct.pack(FORMAT, VERSION, count, first, last, cooling)
  redis.call('SET', key, packed, 'PX', lifetime)
  answers[i] = struct.pack(ANSWER, seen, looping and 1 or 0, math.max(0, cooling - now), now - began, math.max(0, stands))
end

return table.concat(answers)
