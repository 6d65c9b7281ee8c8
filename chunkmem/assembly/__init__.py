"""The parts of a manager: made, and made again over other chunks; and where control enters them."""
