"""An HTTP/1.1 server for one ASGI application: its limits and timers, its TLS, its socket that other processes share.

Floor 1: it imports base alone. It knows no path and no model; who runs it hands it limits, times and the form of errors.

    settings     the limits and times that it is given
    serving      the listening socket, which process accepts a connection, and the server's end
    door         hands the socket on to other processes
    certificate  TLS: one context, which loads a new certificate while the server runs
    protocol     one connection: its requests in order, its limits and timers
    timer        what a connection does when a time is over
    unsent       whether a client takes what was written for it
    idle         which connection gives way to a new one
    turns        how much begins in one pass of the event loop
    call         one request on a connection, and its answer
    chunked      a chunked body
    websocket    a WebSocket on an upgraded call: messages, pings and close
"""
