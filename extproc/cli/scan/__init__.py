"""`loopguard scan`: which agents looped, in transcripts and logs that are on the disk already.

`files` finds them, `lines` reads them in bounded memory, and a reader for each format turns lines into model calls. The
detector of the preset judges these exactly as it judges requests; see `watch`. `work` shares the files between processes,
`report` adds up what they found, and `show` and `page` write it.
"""
# interpreted, with all below: works on files
