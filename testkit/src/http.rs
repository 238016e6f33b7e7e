//! HTTP client for admin ports and other local servers: one connection per request, with a bound on time and bytes.
//!
//! The functions connect without TLS. A [`Client`] connects as a process of the cluster, to a server that it expects.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
pub use http::Request;
use http::header::{CONNECTION, HOST};
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use reprise_identity::{Expected, Security, Stream};

/// Time limit of a request, unless the caller sets one.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Largest accepted body: more than the status page of 1,000 nodes.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Longest accepted line of a stream.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Response of a server.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// HTTP status code.
    pub code: u16,
    /// Header fields.
    pub headers: HeaderMap,
    /// Body as text; invalid UTF-8 is replaced.
    pub body: String,
}

/// Connects to admin ports with the certificate of a process, or without one.
#[derive(Clone, Debug)]
pub struct Client {
    security: Security,
    expected: Expected,
}

/// Fetches `path` from `address` (`host:port`); returns the body of a 200 response.
///
/// # Errors
/// No response within 5 s, or another status.
pub fn get(address: &str, path: &str) -> anyhow::Result<String> {
    body(ask(address, path, TIMEOUT)?, address, path)
}

/// Fetches `path` from `address` within `timeout`, with any status.
///
/// # Errors
/// No response in time.
pub fn ask(address: &str, path: &str, timeout: Duration) -> anyhow::Result<Response> {
    Client::plain().ask(address, path, timeout)
}

/// Sends a request and waits for the response; may be called on any thread, also on one of a runtime.
///
/// # Errors
/// No response within `timeout`.
pub fn send(address: &str, request: Request<String>, timeout: Duration) -> anyhow::Result<Response> {
    Client::plain().send(address, request, timeout)
}

/// Like [`get`], but asynchronous and without a timeout: the caller sets one.
///
/// # Errors
/// No response, or another status than 200.
pub async fn get_async(address: &str, path: &str) -> anyhow::Result<String> {
    body(ask_async(address, path).await?, address, path)
}

/// Like [`ask`], but asynchronous and without a timeout: the caller sets one.
///
/// # Errors
/// No response.
pub async fn ask_async(address: &str, path: &str) -> anyhow::Result<Response> {
    Client::plain().ask_async(address, path).await
}

impl Client {
    /// Connects with these credentials to servers of the expected role.
    pub fn new(security: Security, expected: Expected) -> Client {
        Client { security, expected }
    }

    /// Connects to servers without TLS.
    pub fn plain() -> Client {
        Client::new(Security::Plain, Expected::AnyAgent)
    }

    /// See [`get`].
    ///
    /// # Errors
    /// No response within 5 s, or another status.
    pub fn get(&self, address: &str, path: &str) -> anyhow::Result<String> {
        body(self.ask(address, path, TIMEOUT)?, address, path)
    }

    /// See [`ask`].
    ///
    /// # Errors
    /// No response in time.
    pub fn ask(&self, address: &str, path: &str, timeout: Duration) -> anyhow::Result<Response> {
        self.send(address, get_request(path)?, timeout)
    }

    /// See [`send`].
    ///
    /// # Errors
    /// No response within `timeout`.
    pub fn send(
        &self,
        address: &str,
        request: Request<String>,
        timeout: Duration,
    ) -> anyhow::Result<Response> {
        let answer = async {
            let answer = tokio::time::timeout(timeout, self.send_async(address, request)).await;
            answer.with_context(|| format!("{address} has not answered within {timeout:?}"))?
        };
        // A runtime cannot be entered on a thread that already runs one.
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.context("cannot start a runtime")?.block_on(answer)
            });
            asking.join().expect("sending a request does not panic")
        })
    }

    /// See [`get_async`].
    ///
    /// # Errors
    /// No response, or another status than 200.
    pub async fn get_async(&self, address: &str, path: &str) -> anyhow::Result<String> {
        body(self.ask_async(address, path).await?, address, path)
    }

    /// See [`ask_async`].
    ///
    /// # Errors
    /// No response.
    pub async fn ask_async(&self, address: &str, path: &str) -> anyhow::Result<Response> {
        self.send_async(address, get_request(path)?).await
    }

    /// Fetches `path` from `address`, and passes each line of the body on as it arrives; without a limit on the number of
    /// lines, or on time once the server answers. A last line without a newline is not passed on.
    ///
    /// # Errors
    /// No response, another status than 200, a line of more than 1 MiB, a broken connection, or an error of `each`, which
    /// ends the transfer.
    pub async fn follow_lines(
        &self,
        address: &str,
        path: &str,
        mut each: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let request = get_request(path)?;
        let connected = tokio::time::timeout(TIMEOUT, self.connect(address)).await;
        let (mut sender, connection) =
            connected.with_context(|| format!("cannot connect to {address} within {TIMEOUT:?}"))??;
        let exchange = async move {
            let answered = sender.send_request(addressed(request, address)?);
            let answered = tokio::time::timeout(TIMEOUT, answered).await;
            let (head, mut body) =
                answered.with_context(|| format!("no answer within {TIMEOUT:?}"))??.into_parts();
            if head.status != 200 {
                let text = Limited::new(body, LINE_BYTES_MAX).collect().await;
                let text = text.map(|text| String::from_utf8_lossy(&text.to_bytes()).trim().to_owned());
                bail!("HTTP status {}: {}", head.status.as_u16(), text.unwrap_or_default());
            }
            let mut rest = Vec::new();
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame?.into_data() else { continue };
                rest.extend_from_slice(&data);
                while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = rest.drain(..=end).collect();
                    each(std::str::from_utf8(&line[..end]).context("a line is not UTF-8")?)?;
                }
                ensure!(rest.len() <= LINE_BYTES_MAX, "a line exceeds {LINE_BYTES_MAX} bytes");
            }
            Ok(())
        };
        // The connection is driven here, and ends once the exchange has dropped its sender.
        let (followed, _ended) = tokio::join!(exchange, connection);
        followed.with_context(|| format!("{address}{path}"))
    }

    async fn connect(&self, address: &str) -> anyhow::Result<Exchange> {
        let dialled = self.security.dial(address, self.expected.clone()).await;
        let stream = dialled.with_context(|| format!("cannot connect to {address}"))?;
        Ok(http1::handshake(TokioIo::new(stream)).await?)
    }

    async fn send_async(&self, address: &str, request: Request<String>) -> anyhow::Result<Response> {
        let request = addressed(request, address)?;
        let (mut sender, connection) = self.connect(address).await?;
        let exchange = async move {
            let (head, body) = sender.send_request(request).await?.into_parts();
            let body =
                Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|error| anyhow::anyhow!(error))?;
            let body = String::from_utf8_lossy(&body.to_bytes()).into_owned();
            anyhow::Ok(Response { code: head.status.as_u16(), headers: head.headers, body })
        };
        // The connection is driven here, and ends once the exchange has dropped its sender.
        let (response, _ended) = tokio::join!(exchange, connection);
        response.with_context(|| format!("no valid HTTP response from {address}"))
    }
}

fn get_request(path: &str) -> anyhow::Result<Request<String>> {
    Request::get(path).body(String::new()).with_context(|| format!("invalid path \"{path}\""))
}

type Exchange = (SendRequest<Full<Bytes>>, Connection<TokioIo<Stream>, Full<Bytes>>);

/// Adds the header fields of a request that is the only one of its connection.
fn addressed(request: Request<String>, address: &str) -> anyhow::Result<Request<Full<Bytes>>> {
    let host = HeaderValue::from_str(address)
        .with_context(|| format!("invalid address \"{address}\": expected host:port"))?;
    let mut request = request.map(|body| Full::new(Bytes::from(body)));
    request.headers_mut().insert(HOST, host);
    request.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Ok(request)
}

fn body(Response { code, body, .. }: Response, address: &str, path: &str) -> anyhow::Result<String> {
    ensure!(code == 200, "{address}{path}: HTTP status {code}");
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Serves one connection: reads the request's head, and writes `response`.
    fn serve(response: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on loopback");
        let address = listener.local_addr().expect("bound").to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client connects");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("the client sends its request");
                head.push(byte[0]);
            }
            stream.write_all(response.as_bytes()).expect("the client reads");
        });
        address
    }

    #[test]
    fn returns_bodies_with_a_length_in_chunks_or_until_the_end() {
        for response in [
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            "HTTP/1.0 200 OK\r\n\r\nok",
        ] {
            assert_eq!(get(&serve(response), "/status").expect("a response"), "ok");
        }
    }

    #[test]
    fn another_status_is_an_error_of_get_and_a_result_of_ask() {
        let response = "HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno";
        let error = get(&serve(response), "/x").expect_err("not found").to_string();
        assert!(error.ends_with("/x: HTTP status 404"), "{error}");
        let answer = ask(&serve(response), "/x", TIMEOUT).expect("a response");
        assert_eq!((answer.code, answer.body.as_str()), (404, "no"));
    }

    fn follow(address: &str) -> (Vec<String>, anyhow::Result<()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let mut lines = Vec::new();
        let followed = runtime.block_on(Client::plain().follow_lines(address, "/trace", |line| {
            lines.push(line.to_owned());
            Ok(())
        }));
        (lines, followed)
    }

    #[test]
    fn lines_are_passed_on_across_chunks_and_refusals_have_their_reason() {
        let chunks =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\na\nb\r\n3\r\nc\nd\r\n0\r\n\r\n";
        let (lines, followed) = follow(&serve(chunks));
        followed.expect("a whole response");
        assert_eq!(lines, ["a", "bc"]);
        let torn = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\na\n\r\n5\r\nb";
        let (lines, followed) = follow(&serve(torn));
        assert!(followed.is_err() && lines == ["a"]);
        let (_, refused) = follow(&serve("HTTP/1.1 403 Forbidden\r\ncontent-length: 4\r\n\r\nwhy\n"));
        assert!(format!("{:#}", refused.expect_err("refused")).contains("HTTP status 403: why"));
    }

    #[test]
    fn silent_server_and_torn_response_are_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on loopback");
        let address = listener.local_addr().expect("bound").to_string();
        let error = ask(&address, "/", Duration::from_millis(50)).expect_err("silent").to_string();
        assert!(error.contains("has not answered within"), "{error}");
        let torn = serve("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok");
        let error = get(&torn, "/").expect_err("torn").to_string();
        assert!(error.contains("no valid HTTP response"), "{error}");
    }
}
