"""`loopguard check-envoy --probe`: marked requests through a live gateway, and what Loopguard says about each.

`spellings` lists the requests, `client` sends them, and `verdicts` compares the answers with what Loopguard has noted.
"""
