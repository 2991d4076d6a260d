//! A minimal HTTP client that can also send malformed requests.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// A parsed HTTP response.
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
            status: status.unwrap_or_else(|| panic!("not an HTTP response: {text:?}")),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    pub(crate) fn find_header(&self, wanted: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(name, _)| name.eq_ignore_ascii_case(wanted))
            .map(|(_, value)| value)
    }
}

/// Connects with a small receive buffer, so that the server soon cannot write to a client that does
/// not read.
pub(crate) async fn connect_with_small_buffer(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(address).await.unwrap()
}

/// Sends `bytes` and returns everything received until the connection ends.
pub(crate) async fn send_and_read_all(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: &[u8],
) -> Vec<u8> {
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    read_all(&mut stream).await
}

/// Returns everything received until the connection ends.
pub(crate) async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Sends a request with `headers`, each of which ends with a line break.
pub(crate) async fn send_request(
    address: SocketAddr,
    method_and_path: &str,
    headers: &str,
) -> Response {
    let stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method_and_path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    Response::parse(&send_and_read_all(stream, request.as_bytes()).await)
}

/// Sends a valid GET request.
pub(crate) async fn http_get(address: SocketAddr, path: &str) -> Response {
    send_request(address, &format!("GET {path}"), "Host: localhost\r\n").await
}

/// Sends a WebSocket upgrade request and returns the head of the response.
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

/// Returns a WebSocket upgrade request.
pub(crate) fn upgrade_request(path: &str, headers: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    )
}
