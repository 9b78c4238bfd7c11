"""The probe: a plan's memory measured without a GPU, on the real model code with fake tensors.

``python -m kit.addons.probe PLAN.yaml --stage 0``. See ``kit/addons/probe/run.py``.
"""
