-- sliding_log: the requests of the last window_ms, each remembered by its time.
--
-- KEYS     one or more counter keys, all in one hash slot
-- ARGV     for each key, or once if they are the same for all, seven integers: window_ms, threshold, cooldown_ms,
--          count_refused (1 or 0), count_to (maximum number of times to remember), times (number of requests to count),
--          now_ms (-1: the server's clock)
-- returns  one string, for each key five integers of 8, 1, 8, 8 and 8 bytes, big-endian: count, looping (1 or 0), cooldown left
--          in ms, span in ms, and for how many ms a looping verdict would last if nothing more were counted
--
-- A key's value is a list: cooling_until, then the times in milliseconds, oldest first. The times decide; the key's own expiry
-- only collects garbage. The arithmetic is that of windows.py, request by request.

local ANSWER = '>I8BI8I8I8'
local GARBAGE_MS, CHUNK = 1000, 500

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers = {}

local function read(key, place) return tonumber(redis.call('LINDEX', key, place)) or 0 end

local function pop(key, number)
  local popped = redis.pcall('LPOP', key, number)
  if not popped.err then return popped end
  popped = {} -- before Redis 6.2, one at a time
  for place = 1, number do popped[place] = redis.call('LPOP', key) end
  return popped
end

local function shift(key, number, ahead)
  local times = pop(key, number)
  for place, time in ipairs(times) do times[place] = string.format('%.0f', (tonumber(time) or 0) - ahead) end
  for at = 1, number, CHUNK do redis.call('RPUSH', key, unpack(times, at, math.min(at + CHUNK - 1, number))) end
end

local function drop_old(key, number, until_ms) -- returns how many stay; by bisection, because clients choose the number
  if read(key, 0) > until_ms then return number end
  if read(key, -1) <= until_ms then
    redis.call('DEL', key)
    return 0
  end
  local gone, kept = 0, number - 1 -- the first place that stays is between them
  while gone < kept do
    local middle = math.floor((gone + kept) / 2)
    if read(key, middle) <= until_ms then gone = middle + 1 else kept = middle end
  end
  pop(key, gone)
  return number - gone
end

for i, key in ipairs(KEYS) do
  local at = #ARGV == 7 and 0 or (i - 1) * 7
  local window, threshold, cooldown = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local count_refused, count_to = ARGV[at + 4] == '1', tonumber(ARGV[at + 5])
  local times, now = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  if now == -1 then now = server_now end

  local length = redis.pcall('LLEN', key)
  if type(length) == 'table' then -- not written by Loopguard: one such key must not fail a whole batch
    redis.call('DEL', key)
    length = 0
  end
  local before = length - 1
  local cooling, oldest = 0, now
  if before < 0 then
    before = 0
  else
    cooling = tonumber(redis.call('LPOP', key)) or 0
    local ahead = before > 0 and read(key, -1) - now or 0
    if ahead >= window then -- the clock was set back
      redis.call('DEL', key)
      before = 0
    elseif ahead > 0 then
      shift(key, before, ahead)
    end
    if before > 0 then before = drop_old(key, before, now - window) end
    if before > 0 then oldest = read(key, 0) end
  end

  local ahead = cooling - cooldown - now
  if ahead > 0 then cooling = ahead < cooldown and now + cooldown or 0 end

  local seen, looping, span = 0, false, now - oldest
  for _ = 1, times do
    seen = math.min(before + 1, count_to)
    span = now - oldest
    if now >= cooling and before < threshold and threshold <= before + 1 then
      looping, cooling = true, now + cooldown
    else
      looping = now < cooling or before + 1 >= threshold
    end
    if looping and not count_refused then break end
    redis.call('RPUSH', key, string.format('%.0f', now))
    if before == count_to then
      redis.call('LPOP', key)
      oldest = read(key, 0)
    else
      before = before + 1
    end
  end

  local stands, enough = cooling - now, threshold
  if not count_refused and cooldown == 0 then enough = threshold - 1 end -- else the next one trips
  if before >= enough then -- until the oldest one that is needed is too old
    stands = math.max(stands, read(key, -enough) + window - now)
  end
  redis.call('LPUSH', key, string.format('%.0f', cooling))
  redis.call('PEXPIRE', key, string.format('%.0f', math.max(window, cooling - now) + GARBAGE_MS))
  answers[i] = struct.pack(ANSWER, seen, looping and 1 or 0, math.max(0, cooling - now), span, math.max(0, stands))
end

return table.concat(answers)
