"""The page of `decentral.dashboard` for a terminal of 60 columns or more, as over ssh; steers the peer by key.

Reads through the page's reader and shows its view. Pure, from a view to text: `picture`, `panels`, `cells`. With I/O:
`app`. Textual is an extra; nothing else imports this package but the command line.
"""
