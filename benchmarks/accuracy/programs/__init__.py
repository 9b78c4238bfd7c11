"""Other people's programs in the cost model's terms: what published runs held and how their ranks were split."""
