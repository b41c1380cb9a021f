"""Files of trained state: checkpoints, models, and the formats in which others publish weights."""
