"""Small problems of each format, and solutions of them: cheats, each beside an honest twin."""
