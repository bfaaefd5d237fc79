"""`stub_worker` under another name: bench tells predictions and measurements apart by the module that it starts."""

import stub_worker  # noqa: F401  (runs)
