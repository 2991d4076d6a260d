//! x
#[test]
fn here() { println!("{:?}", std::env::current_exe()); }
