//! Just enough of an HTTP client to also say what no proper client would.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// An answer, taken apart.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
        Self {
            status: status.unwrap_or_else(|| panic!("not an answer: {text:?}")),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    pub(crate) fn header(&self, wanted: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(name, _)| name.eq_ignore_ascii_case(wanted))
            .map(|(_, value)| value)
    }
}

/// Connects as a client for which the kernel keeps little that it has not read.
pub(crate) async fn connect_with_small_buffer(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(address).await.unwrap()
}

/// Sends a few bytes and returns all that comes back until the connection ends, in whatever way.
pub(crate) async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: &[u8],
) -> Vec<u8> {
    // The server may end the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    read_all(&mut stream).await
}

/// All that comes until the connection ends, in whatever way.
pub(crate) async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Sends a request with some headers, each ending in a line break.
pub(crate) async fn request(address: SocketAddr, method_and_path: &str, headers: &str) -> Response {
    let stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method_and_path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    Response::parse(&exchange(stream, request.as_bytes()).await)
}

/// Gets a path as any client would.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    request(address, &format!("GET {path}"), "Host: localhost\r\n").await
}

/// Asks to speak WebSocket.
pub(crate) async fn request_upgrade(address: SocketAddr, path: &str, headers: &str) -> Response {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = upgrade_request(path, headers);
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    Response::parse(&head)
}

/// A request to speak WebSocket.
pub(crate) fn upgrade_request(path: &str, headers: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    )
}
