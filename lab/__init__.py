"""What measures the engines: side by side, beside other libraries, planned, simulated, and drawn."""

import zero_stages

zero_stages.check("interop")
