"""The page of `decentral.dashboard` for a terminal of 60 columns or more, as over ssh; steers the peer by key.

Reads through the page's reader and shows its view. Pure, from a view to text: `head`, `own`, `others`, `strip`, `loss`,
`news`, `keys`, `places`, `cells`. With I/O: `folder`, `app`, `dialogs`. Textual is an extra; nothing else imports this
room but the command line.
"""
