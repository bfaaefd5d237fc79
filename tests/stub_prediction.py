"""`stub_worker` under another name: bench tells predictions and measurements apart by the module that it starts."""

import os

import stub_worker

if __name__ == "__main__":
    stub_worker.main()
    os._exit(0)
