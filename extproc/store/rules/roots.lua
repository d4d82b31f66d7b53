-- roots: the root session of each agent whose requests name only its parent.
--
-- KEYS     for each agent two keys, all in one hash slot: its own and its parent's
-- ARGV     for each agent, or once if they are the same for all, two values: the parent's session (8 bytes), ttl_ms
-- returns  for each agent its root session
--
-- root.lua is loaded before this file.

local answers, at = {}, 0
for place = 1, #KEYS, 2 do
  answers[#answers + 1] = find_root(KEYS[place], KEYS[place + 1], ARGV[at + 1], ARGV[at + 2])
  if #ARGV > 2 then at = at + 2 end
end
return answers
