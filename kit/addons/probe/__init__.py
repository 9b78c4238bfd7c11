"""The probe: a plan's memory measured without a GPU, on the real model code with fake tensors.

``kit probe PLAN.yaml --stage 0``. See ``kit/addons/probe/run.py``. It patches torch for good, so a process that has
probed does nothing else.
"""
