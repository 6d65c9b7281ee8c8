"""The parts of a manager made again over other chunks, and the content of the old ones moved into them."""
