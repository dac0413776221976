"""Measurements of the engines: compared, against other libraries, planned, simulated, and drawn."""

import zero_stages

zero_stages.check("interop")
