"""Small tools without a subject of this project: files, numbers, flags, signals, output."""
