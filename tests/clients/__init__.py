"""`make test-clients`: real clients through Envoy and Loopguard. Pytest collects nothing here."""

import sys

from tests.support import ROOT

sys.path.append(str(ROOT / "envoy"))  # the parts of a model
