"""What failures would cost on a fabric: all sets of them that differ, or a sample; expected bandwidth."""
