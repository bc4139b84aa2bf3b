"""Settings shared by every test: one thread per process, and hypothesis profiles.

``make test`` uses the profile "quick", ``make test-full`` the profile "full". A failing example prints a
``@reproduce_failure`` line; ``--hypothesis-seed=N`` repeats a run.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch

torch.set_num_threads(1)

_common = {
    "deadline": None,  # a shared two-core machine has no steady clock
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("quick", max_examples=25, derandomize=True, **_common)
hypothesis.settings.register_profile("full", max_examples=250, **_common)
hypothesis.settings.load_profile("quick")
