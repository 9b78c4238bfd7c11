"""The planner in a browser: ``kit ui``.

Only ``kit.addons.ui.page`` and ``kit.addons.ui.server`` import NiceGUI (extra ``ui``).
"""
