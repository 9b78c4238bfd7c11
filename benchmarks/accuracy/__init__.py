"""How far the cost model's predictions lie from published measurements."""
