"""From model, cluster and job to the fastest legal layout that fits, with the reasons."""
