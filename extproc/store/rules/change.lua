-- change: reads the keys of questions, or writes what has become of them if nothing that was read has changed since.
--
-- KEYS     for each question its keys, all in one hash slot. A single question may come with its first key only
-- ARGV     for each question, or once if they are the same for all: its number of keys, and its time in milliseconds, or -1 if its
--          keys are only to be read; else for each key three values:
--          - the value that was read ('' for none), the new one, and how long it is kept in milliseconds, 0 if it stays the same
--          - of an account: what is charged, the most that it may have before, and minus how long it is kept
--          - of a key that does not matter: '', '', -1
-- returns  for each question '' if everything was written, or its keys' values and the server's time in milliseconds
--
-- All of a question is written, or nothing. An account is what a caller has taken up since it began, packed as USAGE.

local VERSION = 2
local USAGE, USAGE_SIZE = '>BBI8I4I8', 22
local GARBAGE_MS = 1000

local clock = redis.call('TIME')
local server_now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local values = {} -- by their keys; '' for none, and for what Loopguard has not written
for i, value in ipairs(redis.call('MGET', unpack(KEYS))) do values[KEYS[i]] = value or '' end

local function read_usage(value, now) -- when it began, and how much it is
  if #value == USAGE_SIZE and string.byte(value) == VERSION then
    local _, _, started, life, used = struct.unpack(USAGE, value)
    if math.abs(now - started) < life then return started, used end
  end
  return now, 0
end

local function is_same(value, old, new, life, now)
  if life < -1 then return select(2, read_usage(value, now)) <= tonumber(new) end
  return life == -1 or value == old
end

local function write(key, old, new, life, now)
  if life == 0 and values[key] == '' then redis.call('DEL', key) end -- what is there all the same is not Loopguard's
  if life == 0 or life == -1 then return end
  if life < -1 then
    local started, used = read_usage(values[key], now)
    new, life = struct.pack(USAGE, VERSION, 0, started, -life, used + old), GARBAGE_MS - life
  end
  redis.call('SET', key, new, 'PX', life)
  values[key] = new
end

local answers, first, at = {}, 0, 0
while first < #KEYS do
  if at == #ARGV then at = 0 end
  local number, now = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local known, same = #KEYS == 1 and 1 or number, now >= 0
  for i = 1, same and known or 0 do
    local old, new, life = ARGV[at + 3 * i], ARGV[at + 3 * i + 1], tonumber(ARGV[at + 3 * i + 2])
    same = same and is_same(values[KEYS[first + i]], old, new, life, now)
  end
  local answer = same and '' or {}
  for i = 1, known do
    local key = KEYS[first + i]
    if same then
      write(key, ARGV[at + 3 * i], ARGV[at + 3 * i + 1], tonumber(ARGV[at + 3 * i + 2]), now)
    else
      answer[i] = values[key]
    end
  end
  if not same then answer[known + 1] = string.format('%.0f', server_now) end
  answers[#answers + 1] = answer
  first, at = first + known, at + 2 + (now >= 0 and 3 * number or 0)
end
return answers
