"""`loopguard scan`: finds loops in agents' transcripts and logs on disk.

`files` finds the files, `lines` reads them in bounded memory, and a reader for each format converts
lines to model calls. The preset's detector judges these exactly as it judges requests; see `watch`.
`work` shares files between processes, `report` adds up the results, and `show` and `page` print
them.
"""
# interpreted, with all below: reads files
