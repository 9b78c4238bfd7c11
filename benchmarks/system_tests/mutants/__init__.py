"""Small realistic bugs, planted one at a time, and whether the tests notice them."""
