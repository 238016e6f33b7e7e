//! The program in the pods of the tests, static and without dependencies beyond the standard library:
//!
//! * `pod pause`: does nothing until it is killed;
//! * `pod serve PORT`: answers `GET /` with the name of its pod and node, and `GET /via/HOST:PORT` with the
//!   body that it gets from there;
//! * `pod get HOST:PORT[/PATH]`: prints the body that it gets.

use std::env;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// Timeout of connects and of reads.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of a request that are read at most.
const REQUEST_MAX: u64 = 1024;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["pause"] => loop {
            thread::park();
        },
        ["serve", port] => serve(port),
        ["get", url] => get(url).and_then(|answer| std::io::stdout().write_all(answer.as_bytes())),
        _ => Err(Error::other("pause | serve PORT | get HOST:PORT[/PATH]")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // For the pod's log; nothing more can be done when standard error is closed.
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(port: &str) -> Result<()> {
    let port: u16 = port.parse().map_err(Error::other)?;
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    writeln!(std::io::stdout(), "serving on {port}")?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || answer(stream));
    }
    Ok(())
}

/// Answers one request. An error means that the client is gone.
fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = String::new();
    // Reads the whole request: unread bytes would turn the end of the response into a connection reset.
    for line in BufReader::new((&stream).take(REQUEST_MAX)).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        request.push_str(&line);
    }
    let path = request.split(' ').nth(1).unwrap_or_default();
    let own = || Ok(format!("{} on {}\n", of("POD_NAME"), of("NODE_NAME")));
    let (status, body) = match path.strip_prefix("/via/").map_or_else(own, get) {
        Ok(body) => ("200 OK", body),
        Err(error) => ("502 Bad Gateway", format!("{error}\n")),
    };
    let length = body.len();
    write!(stream, "HTTP/1.0 {status}\r\nContent-Length: {length}\r\n\r\n{body}")
}

fn of(variable: &str) -> String {
    env::var(variable).unwrap_or_else(|_| "unnamed".to_owned())
}

/// Returns the body of a GET to `host:port[/path]`.
fn get(url: &str) -> Result<String> {
    let (host, path) = url.split_once('/').unwrap_or((url, ""));
    let address = host.to_socket_addrs()?.next();
    let address = address.ok_or_else(|| Error::new(ErrorKind::NotFound, "the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /{path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.contains(" 200 ") => Ok(body.to_owned()),
        _ => Err(Error::other(format!("unexpected response: {answer}"))),
    }
}
