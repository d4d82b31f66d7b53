"""`loopguard check-envoy`: settings in an Envoy's configuration that would cause problems.

`document` reads it, from a file or from a running Envoy, and knows where each thing stands. `config` finds in it what matters:
listeners, routes, and the filters that ask Loopguard. Each file of `checks/` is about one part of that. A check yields
findings, which say what is wrong, where, and what would be right; a note says what cannot be known, or is a choice.
"""
