"""Tokenised data: the same samples in the same order for every engine and layout."""
