//! x
fn main() { println!("{:?}", candle_core::Device::Cpu); }
