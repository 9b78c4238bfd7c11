"""Programs that measure kit and prove its claims; training needs none of them."""
