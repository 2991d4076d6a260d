//! Host names and addresses in `Host` and `Origin` headers.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::uri::Authority;

/// A host name or address without a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Host {
    /// A name in lower case.
    Name(String),
    /// An address; an IPv4-mapped IPv6 address is stored as IPv4.
    Address(IpAddr),
}

impl Host {
    /// Parses a `Host` header. Returns `None` if the header is malformed.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.contains('@') {
            return None;
        }
        let authority: Authority = text.parse().ok()?;
        let host = authority.host();
        if let Some(inner) = host.strip_prefix('[') {
            let address: Ipv6Addr = inner.strip_suffix(']')?.parse().ok()?;
            return Some(Self::Address(address.to_canonical()));
        }
        match host.parse() {
            _ if host.is_empty() => None,
            Ok(address) => Some(Self::Address(address)),
            Err(_) => Some(Self::Name(host.to_ascii_lowercase())),
        }
    }

    /// Parses an `Origin` header. Returns `None` unless the header has an HTTP scheme and a host.
    pub(crate) fn parse_origin(text: &str) -> Option<Self> {
        let host = text
            .strip_prefix("http://")
            .or_else(|| text.strip_prefix("https://"))?;
        Self::parse(host)
    }

    /// Whether the host is `localhost` or a loopback address.
    pub(crate) fn is_loopback(&self) -> bool {
        match self {
            Self::Name(name) => name == "localhost",
            Self::Address(address) => address.is_loopback(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_hosts_are_accepted_as_loopback() {
        let loopback = |text: &str| Host::parse(text).is_some_and(|host| host.is_loopback());
        for text in [
            "localhost",
            "LocalHost:9091",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.8.8.8:1",
            "[::1]",
            "[::1]:9091",
            "[::ffff:127.0.0.1]:9091",
        ] {
            assert!(loopback(text), "{text}");
        }
        for text in [
            "",
            ":80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "evil.example@localhost",
            "::1",
            "[::1",
            "[evil]",
            "0.0.0.0",
            "10.0.0.1",
            "localhost/",
            "local host",
        ] {
            assert!(!loopback(text), "{text}");
        }
    }

    #[test]
    fn an_origin_needs_an_http_scheme_and_a_host() {
        assert_eq!(
            Host::parse_origin("https://Example.org:8443"),
            Some(Host::Name("example.org".into()))
        );
        for text in ["null", "file://", "localhost", "http://", "ftp://localhost"] {
            assert_eq!(Host::parse_origin(text), None, "{text}");
        }
    }
}
