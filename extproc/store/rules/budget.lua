-- budget: budgets of callers: buckets, periods of the calendar, and breakers that open at a rate of spending.
--
-- KEYS     one or more keys of budgets, all in one hash slot; the key of a settlement's marker follows that of its budget
-- ARGV     for each budget, or once if they are the same for all, nine integers: joined (1: it belongs to the group of the
--          budget before it, 2: a settlement that has a marker), kind (0 bucket, 1 period, 2 breaker), amount, limit, rate,
--          span, offset, start (-1: take; else settle), now_ms (-1: the server's clock)
-- returns  one string, for each budget six integers of 1, 1, 8, 8, 8 and 8 bytes, big-endian: granted (1 or 0), fits (1 or 0),
--          left, wait in ms (-1: never), start, reset in ms; for a settlement 1, or 0 if its marker was set, and zeros
--
-- The takes of a group are all granted, or none is. A key's value is a version and the state of budget.py, packed: two integers,
-- four for a breaker. A marker's value is a version and the time at which it was set. The value decides; the key's own expiry
-- only collects garbage. The arithmetic is that of budget.py.

local VERSION = 1
local SHORT, LONG, ANSWER = '>Bi8i8', '>Bi8i8i8i8', '>BBi8i8i8i8'
local BUCKET, PERIOD = 0, 1
local MINUTE, YEAR, GARBAGE_MS, FOREVER = 60000, 31536000000, 1000, -1
local MARK, MARKED_MS = '>Bi8', 300000
local LOWEST, HIGHEST = -3000000000000000, 4000000000000000

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answers, group = {}, {}

local function read(one)
  local value = redis.pcall('GET', one.key) -- an error for a key of another program
  local short = one.kind == BUCKET or one.kind == PERIOD
  if type(value) ~= 'string' or #value ~= (short and 17 or 33) or string.byte(value) ~= VERSION then return nil end
  local _, first, second, third, fourth = struct.unpack(short and SHORT or LONG, value)
  return first, second, short and 0 or third, short and 0 or fourth
end

local function advance(one)
  local now, first, second, third, fourth = one.now, read(one)
  if one.kind == BUCKET then
    if not first then return one.limit, now, 0, 0 end
    return math.min(one.limit, first + math.max(0, now - second) * one.rate), now, 0, 0
  elseif one.kind == PERIOD then
    local start = now - (now - one.offset) % one.span
    if not first or start > first or first - start > one.span then return start, 0, 0, 0 end
    return first, second, 0, 0
  end
  local begun = now - now % MINUTE
  if not first then return begun, 0, 0, 0 end
  if fourth ~= FOREVER and fourth > now + one.span then fourth = now + one.span end
  if begun == first + MINUTE then return begun, 0, second, fourth end
  if begun > first or first - begun > MINUTE then return begun, 0, 0, fourth end
  return first, second, third, fourth
end

local function check_breaker(one)
  local now = one.now
  one.left, one.begun = 0, one.first
  if one.fourth == FOREVER or now < one.fourth then
    one.wait = one.fourth == FOREVER and FOREVER or one.fourth - now
    one.reset = math.max(0, one.wait)
    return false
  end
  local part = MINUTE - math.max(0, now - one.first)
  local before = math.floor(one.third / MINUTE) * part + math.floor(one.third % MINUTE * part / MINUTE)
  local left = one.limit - one.second - before
  if left > one.amount then
    one.left, one.wait, one.reset = left, 0, MINUTE
    return true
  end
  one.second, one.third = 0, 0
  one.fourth = one.span > 0 and now + one.span or FOREVER
  one.wait, one.reset = one.span > 0 and one.span or FOREVER, one.span
  return false
end

local function check(one)
  one.first, one.second, one.third, one.fourth = advance(one)
  if one.kind == BUCKET then
    one.left, one.begun = one.first, one.now
    one.wait = math.ceil((one.amount - one.left) / one.rate)
    one.reset = math.ceil((one.limit - one.left) / one.rate)
  elseif one.kind == PERIOD then
    one.left, one.begun = one.limit - one.second, one.first
    one.wait = one.first + one.span - one.now
    one.reset = one.wait
  else
    return check_breaker(one)
  end
  local fits = one.left >= one.amount
  if fits then one.wait = 0 elseif one.amount > one.limit then one.wait = FOREVER end
  return fits
end

local function write(one)
  local lasts
  if one.kind == BUCKET then
    lasts = math.ceil((one.limit - one.first) / one.rate)
  elseif one.kind == PERIOD then
    lasts = one.first + one.span - one.now
  else
    lasts = one.fourth == FOREVER and YEAR or math.max(2 * MINUTE, one.fourth - one.now)
  end
  local value
  if one.kind == BUCKET or one.kind == PERIOD then
    value = struct.pack(SHORT, VERSION, one.first, one.second)
  else
    value = struct.pack(LONG, VERSION, one.first, one.second, one.third, one.fourth)
  end
  redis.call('SET', one.key, value, 'PX', string.format('%.0f', math.min(lasts, YEAR) + GARBAGE_MS))
end

local function finish()
  local granted = true
  for _, one in ipairs(group) do
    one.fits = check(one)
    granted = granted and one.fits
  end
  for _, one in ipairs(group) do
    if granted then
      one.left = one.left - one.amount
      if one.kind == BUCKET then
        one.first = one.first - one.amount
        one.reset = math.ceil((one.limit - one.left) / one.rate)
      else
        one.second = one.second + one.amount
      end
    end
    write(one)
    local fits = one.fits and 1 or 0
    answers[#answers + 1] = struct.pack(ANSWER, granted and 1 or 0, fits, one.left, one.wait, one.begun, one.reset)
  end
  group = {}
end

local function is_marked(one)
  local value = redis.pcall('GET', one.marker)
  if type(value) ~= 'string' or #value ~= 9 or string.byte(value) ~= VERSION then return false end
  local _, marked = struct.unpack(MARK, value)
  return math.abs(one.now - marked) < MARKED_MS
end

local function settle(one)
  if one.marker then
    if is_marked(one) then
      answers[#answers + 1] = struct.pack(ANSWER, 0, 0, 0, 0, 0, 0)
      return
    end
    redis.call('SET', one.marker, struct.pack(MARK, VERSION, one.now), 'PX', MARKED_MS)
  end
  one.first, one.second, one.third, one.fourth = advance(one)
  if one.kind == BUCKET then
    one.first = math.min(one.limit, math.max(LOWEST, one.first + one.amount))
  elseif one.first == one.start then
    one.second = math.min(HIGHEST, math.max(0, one.second - one.amount))
  elseif one.kind ~= PERIOD and one.first == one.start + MINUTE then
    one.third = math.min(HIGHEST, math.max(0, one.third - one.amount))
  end
  write(one)
  answers[#answers + 1] = struct.pack(ANSWER, 1, 0, 0, 0, 0, 0)
end

local at, place = 0, 1
while place <= #KEYS do
  local one = {
    key = KEYS[place], kind = tonumber(ARGV[at + 2]), amount = tonumber(ARGV[at + 3]), limit = tonumber(ARGV[at + 4]),
    rate = tonumber(ARGV[at + 5]), span = tonumber(ARGV[at + 6]), offset = tonumber(ARGV[at + 7]),
    start = tonumber(ARGV[at + 8]), now = tonumber(ARGV[at + 9]),
  }
  if one.now == -1 then one.now = server_now end
  if ARGV[at + 1] == '2' then
    place = place + 1
    one.marker = KEYS[place]
  end
  local settles = one.start >= 0
  if #group > 0 and (settles or ARGV[at + 1] ~= '1') then finish() end
  if settles then settle(one) else group[#group + 1] = one end
  place = place + 1
  if #ARGV > 9 then at = at + 9 end
end
if #group > 0 then finish() end

return table.concat(answers)
