"""The attention operator alone, beside those of other engines."""
