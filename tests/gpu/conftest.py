"""Ranks that are threads of one process share its hardware queues: ask for all there are, before CUDA starts."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
