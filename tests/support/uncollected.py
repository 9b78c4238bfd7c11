"""Import it before much else: Python does not look for garbage among what is imported, until somebody enables that."""

import gc

gc.disable()
