"""`loopguard check-envoy`: finds settings in an Envoy configuration that would cause problems.

`document` reads the configuration from a file or a running Envoy, with the place of each value.
`config` finds the relevant parts: listeners, routes, and the filters that call Loopguard. Each file
of `checks/` checks one of these parts. A check yields findings: what is wrong, where, and what
would be right. A note is about something unknown, or a matter of choice.
"""
