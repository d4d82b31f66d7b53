"""Real clients through the real Envoy and Loopguard.

`make test-clients`. Pytest collects nothing here.
"""

import sys

from tests.support import ROOT

sys.path.append(str(ROOT / "envoy"))  # the parts of a model
