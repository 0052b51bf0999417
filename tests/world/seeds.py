"""Seeds that broke a promise once. A seed draws another schedule when the world draws something more or less, so each bug has a test
of its own, too; these are run because where a bug was, another one may be.
"""

FOUND = {
    69: "a new request waited 5 s while a node was away: routers look for another node after a silence, not at once",
    1181595329: "a decode node kept its blocks for a prefill node stopped on its machine, and nothing was promised of it",
    3157087200: "a full disk refused to forget, and what was wrong came back from it after a restart",
    4090531134: "a request had left each decode node once, because blocks were kept there, and so stayed on the last such node",
    3753319020: "an idle node's status seemed old, so a router counted what another had sent there until the next step",
    4239387055: "a node was restarted right after a reset, and a reader whose link had failed never heard of it",
    910027: "a router whose clock is slower than its loop's set an alarm again and again",
    3025149879: "a block of recurrent states was given back while a peer still wrote to it",
    3025149909: "a request went on from such a block, and a token was wrong",
    2000252: "a preempted request stayed on such a node, though another had room",
    1647009301: "the world's: a time of day jumped while no process lived",
    362652607: "a request that was alone on a node, and began again and again for want of blocks, counted as one that runs",
    1294892991: "a request that had moved as often as it may stayed on a node whose blocks waited for a silent peer",
    3949098454: "a request looked once for a node with room, and its last token, which a prefill node gives, waited for a decode node",
    2178808423: "a node that was lost and started again stayed avoided, so a request waited on one whose blocks a silent peer held",
    2934354705: "the world's: a node that was killed before its disk had forgotten wrong KV counted as reset",
    3987915351: "two nodes admitted four requests in different orders, and each waited for blocks that the other kept",
}

FOUND_IN_CONTROL = {
    770043: "an order reached a controller before that had read the record, and was recorded over it",
    770063: "a node came back while the store was full, and its new incarnation was never recorded",
    770172: "nodes on a machine that was not seen were forgotten, and kept their places",
    770271: "a node that was left out held the place that a rollout has beyond the pool's size",
    770300: "a rollout waited for nodes on an evacuated machine",
    770316: "a rollout was over though no new node had served: the old ones had gone with their machine",
    800073: "what was drained on a machine that was not seen was forgotten, and ran on",
    800202: "a new router started before the others were known, so it got no socket, and the rollout was taken back",
    800245: "the new one of two nodes that decode was drained, and the rollout took the other",
    62000132: "a rollout took old nodes away for new ones whose end, on a machine that was not seen, nothing had told of",
    910124: "a controller that stood still while its deployment was ended started it again",
    840291: "a node that was leaving before it had served ran on when its controller died",
    3580857179: "a node that left before its next controller could reach it was forgotten, and ran on",
    1329545341: "a node that changed its role was taken for gone with its machine, which was not seen: no router hears it then",
    3949098090: "a controller that was stopped while it looked for a process created it after its successor had ended the deployment",
    1714867158: "the world's: what a new controller records of what it read is no order that may have to be taken back",
    3131166648: "an operator drained the last old node that decodes in a rollout whose new nodes died later",
    5100000168: "the world's: a controller that only learnt that it was replaced had read a record whose answer was lost",
    901151483: "the world's: a node that had started again, and was not announced yet, counted as one that served",
}
